"""Version bounds of packages, as far as they are read here: `>=`, `>`, `<`, `<=`, `==` and `!=` over numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator

from headrace.doctor.facts import Requirement, Version

_LINE = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_OPERATORS: dict[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def version_of(text: str) -> Version:
    """The numbers that a version begins with: `2.13.0+cpu` is (2, 13, 0)."""
    found: list[int] = []
    for part in re.split(r"[.+-]", text.strip()):
        number = re.match(r"\d+", part)
        if number is None:
            break
        found.append(int(number[0]))
        if number[0] != part:  # 0rc2
            break
    return tuple(found)


def read(owner: str, lines: Iterable[str]) -> Iterator[Requirement]:
    """Requirements of a package's metadata (PEP 508); those that name no bound, or a URL, say nothing here."""
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        name, bounds, marker = found[1], found[2] or "", found[3] or ""
        extra = _EXTRA.search(marker)
        pairs = tuple(_bounds(bounds))
        if pairs:
            yield Requirement(f"{owner}[{extra[1]}]" if extra else owner, normal(name), pairs, extra is not None)


def normal(name: str) -> str:
    """A package's name in the one spelling (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_met(requirement: Requirement, installed: str) -> bool:
    """Whether a version lies within the bounds."""
    return all(_holds(installed, sign, wanted) for sign, wanted in requirement.bounds)


def text_of(requirement: Requirement) -> str:
    return requirement.name + ",".join(sign + wanted for sign, wanted in requirement.bounds)


def _bounds(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        found = re.match(r"^\s*(>=|<=|==|!=|~=|>|<)\s*([0-9][^\s]*)\s*$", part)
        if found is not None:
            sign, wanted = found[1], found[2]
            yield (">=", wanted) if sign == "~=" else (sign, wanted)


def _holds(installed: str, sign: str, wanted: str) -> bool:
    have, bound = version_of(installed), version_of(wanted)
    if wanted.endswith(".*"):
        have = have[: len(bound)]
    length = max(len(have), len(bound))
    return _OPERATORS[sign](_padded(have, length), _padded(bound, length))


def _padded(version: Version, length: int) -> Version:
    return version + (0,) * (length - len(version))
