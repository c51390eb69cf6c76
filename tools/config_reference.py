"""Writes docs/configuration.md from the configuration's classes, its flags and its environment variables.

    python tools/config_reference.py [--check]

`--check` writes nothing and ends with 1 where the committed page is another.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from headrace import env
from headrace.cli.options import LLM_FLAGS, SERVER_FLAGS, SERVING_LLM_FLAGS, Flag
from headrace.config.base import ConfigModel, default_of, label_of
from headrace.config.errors import describe, join, model_classes
from headrace.config.llm_args import LlmArgs
from headrace.config.own import HeadraceArgs
from headrace.config.serving import SERVER_YAML_KEYS, DisaggClusterConfig, ServerOptions
from headrace.config.unbuilt import BUILT_VALUES, UNBUILT, UNBUILT_SERVER, WITHOUT_EFFECT

PAGE = Path(__file__).resolve().parent.parent / "docs/configuration.md"
OWN = "Headrace's own"
INTRO = """# Configuration

<!-- Written by tools/config_reference.py from the classes of headrace.config: change those, not this page. -->

Every setting of the engine is a key of the YAML file that `--config` names, and a keyword of `LLM(...)`; the common
ones are flags, too. Names, defaults and meanings are those of TensorRT-LLM's LLM API, so its files load as they are.
A key that nobody knows, or a value that can't be, is an error that names it, its place and the nearest that is right.

    printf 'max_batch_size: 16\\nkv_cache_config:\\n  max_tokens: 8192\\n' > config.yml
    headrace config check config.yml
    headrace config show smollm2 --config config.yml --set kv_cache_config.enable_block_reuse=false
    headrace config schema --output headrace.schema.json

`check` loads nothing and tells what is wrong, `show` prints what a file and flags resolve to and where each value comes
from (`--all` for those that have their defaults, too), and `schema` writes a JSON Schema, with which editors complete
keys.

- A value in the file replaces the default. A flag that contradicts the file is an error; `--set KEY=VALUE`, with a
  dotted key and a value in YAML, replaces either (not for {refused}).
- Flags may be written with hyphens instead of underscores.
- *Not built* means that another value than the default is refused by name; *no effect* that it is accepted, since it
  can only change speed, and listed at start. What is marked as beta or prototype may still change its name or meaning.
"""
HEADER = ("key", "value", "default", "flag", "meaning")


def page() -> str:
    """The page's text."""
    from headrace.config.resolution import SET_REFUSED

    parts = [INTRO.replace("{refused}", ", ".join(f"`{name}`" for name in SET_REFUSED))]
    flags = flags_by_path((*LLM_FLAGS, *SERVING_LLM_FLAGS))
    parts.append("## The engine\n")
    for title, names in groups().items():
        parts.append(f"### {title}\n")
        parts.append(table(HEADER, (row(LlmArgs, name, name, flags) for name in names)))
    parts.append("## Groups of keys\n\nA key above whose value is a mapping has these keys.\n")
    for path, cls in dict.fromkeys(objects(LlmArgs)):
        parts.append(section(path, cls, flags))
    parts.append(server_part())
    parts.append(variables_part())
    return "\n".join(parts)


def section(path: str, cls: type[ConfigModel], flags: dict[str, list[str]]) -> str:
    """One class at one place."""
    rows = table(HEADER, (row(cls, name, f"{path}.{name}", flags) for name in cls.model_fields))
    unbuilt = f"\n*Not built: {UNBUILT[path]}.*\n" if path in UNBUILT else ""
    return f"### {path} ({cls.__name__})\n\n{first_sentence(cls)}\n{unbuilt}\n{rows}"


def server_part() -> str:
    flags = flags_by_path(SERVER_FLAGS)
    rows = [row(ServerOptions, name, name, flags, unbuilt=UNBUILT_SERVER) for name in ServerOptions.model_fields]
    keys = ", ".join(f"`{name}`" for name in SERVER_YAML_KEYS)
    cluster = section("disagg_cluster", DisaggClusterConfig, {})
    return (
        f"## The server\n\nFlags of `headrace serve` alone; {keys} are keys of the file as well.\n\n"
        f"{table(HEADER, rows)}\n{cluster}"
    )


def variables_part() -> str:
    rows = [(f"`{each.name}`", each.kind, f"`{each.default}`" if each.default else "", each.meaning) for each in
            env.VARIABLES]  # fmt: skip
    return "## Environment variables\n\n" + table(("variable", "value", "default", "meaning"), rows)


def groups() -> dict[str, list[str]]:
    """Top-level keys by the headings that comments in the class give them."""
    found: dict[str, list[str]] = {}
    for cls, title in ((LlmArgs, ""), (HeadraceArgs, OWN)):
        for line in inspect.getsource(cls).splitlines():
            comment, key = re.fullmatch(r"    # (.+)", line), re.match(r"    (\w+): ", line)
            if comment:
                title = comment[1]
            elif key and key[1] in LlmArgs.model_fields:
                found.setdefault(title, []).append(key[1])
    assert sum(map(len, found.values())) == len(LlmArgs.model_fields) and "" not in found
    return found


def objects(root: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, type[ConfigModel]]]:
    """Every class below `root` with its dotted place; a place may have several kinds."""
    for name, field in root.model_fields.items():
        for cls in dict.fromkeys(model_classes(field.annotation)):
            kind = cast("type[ConfigModel]", cls)
            path = join(prefix, name)
            yield path, kind
            yield from objects(kind, path)


def row(
    cls: type[ConfigModel],
    name: str,
    path: str,
    flags: dict[str, list[str]],
    *,
    unbuilt: dict[str, str] = UNBUILT,
) -> tuple[str, ...]:
    field = cls.model_fields[name]
    meaning = [field.description or ""]
    if path in unbuilt:
        meaning.append(f"*Not built: {unbuilt[path]}.*")
    if path in BUILT_VALUES and cls is not ServerOptions:
        values, feature = BUILT_VALUES[path]
        works = ", ".join(f"`{shown(value)}`" for value in dict.fromkeys(values))
        meaning.append(f"*Works: {works}; not built: {feature}.*")
    if path in WITHOUT_EFFECT and cls is not ServerOptions:
        meaning.append(f"*No effect: {WITHOUT_EFFECT[path]}.*")
    status = label_of(field, "status")
    if status not in (None, "stable"):
        meaning.append(f"({status}{'; Python only' if label_of(field, 'python_only') else ''})")
    names = " ".join(f"`{flag}`" for flag in flags.get(path, []))
    return f"`{name}`", value_of(field), default(cls, name), names, " ".join(meaning)


def value_of(field: FieldInfo) -> str:
    """What may be written, with its bounds."""
    text = "an object" if label_of(field, "python_only") else describe(field.annotation)
    bounds = [
        f"{sign} {bound:g}"
        for limit in field.metadata
        for kind, sign, bound in (
            (Ge, "≥", getattr(limit, "ge", 0)),
            (Gt, ">", getattr(limit, "gt", 0)),
            (Le, "≤", getattr(limit, "le", 0)),
            (Lt, "<", getattr(limit, "lt", 0)),
        )
        if isinstance(limit, kind)
    ]
    null = ", null" if text.startswith("one of") else " or null"
    null = null if NoneType in get_args(field.annotation) else ""
    return f"{text}{' ' + ', '.join(bounds) if bounds else ''}{null}"


def default(cls: type[ConfigModel], name: str) -> str:
    if cls.model_fields[name].is_required():
        return "required"
    value = default_of(cls, name)
    return "its defaults" if isinstance(value, ConfigModel) else f"`{shown(value)}`"


def shown(value: Any) -> str:
    """As it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, (set, frozenset, tuple)):
        return str(list(cast("Iterable[Any]", value)))
    return '""' if value == "" else str(value)


def first_sentence(cls: type[ConfigModel]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def flags_by_path(flags: Sequence[Flag]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for flag in flags:
        spellings = [*flag.names, flag.off] if flag.off else flag.names
        found.setdefault(flag.path, []).extend(f"--{name}" for name in spellings)
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main() -> int:
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == page():
            return 0
        print("docs/configuration.md is out of date: run python tools/config_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
