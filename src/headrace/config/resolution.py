"""Defaults, a YAML file, typed flags and `--set` become one frozen configuration that knows each value's origin."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import ValidationError

from headrace import env
from headrace.config.base import ConfigModel, label_of
from headrace.config.errors import ConfigError, Problem, model_classes, problems_from
from headrace.config.llm_args import LlmArgs
from headrace.config.rules import Note, contradictions, settle_consequences, what_this_machine_lacks
from headrace.config.serving import SERVER_YAML_KEYS, ServerOptions
from headrace.config.source import Document, nearest, parse_value, read_document
from headrace.config.traps import traps
from headrace.config.unbuilt import refuse_unbuilt, refuse_unbuilt_server, without_effect

SET_REFUSED = (
    "model", "backend", "telemetry_config", "env_overrides", *SERVER_YAML_KEYS, "batched_logits_processor",
    "checkpoint_loader", "mpi_session", "ray_placement_config.placement_groups", "speculative_config.drafter",
    "speculative_config.resource_manager",
)  # fmt: skip
"""Keys that `--set` may not change: identity, secrets and objects that only Python can make."""

_LOGGER = logging.getLogger("headrace.config")
_Model = TypeVar("_Model", bound=ConfigModel)


class Typed(NamedTuple):
    """A value that the user typed on the command line."""

    label: str
    """The flag, for example `--tp_size`."""
    value: Any


@dataclass(frozen=True, slots=True)
class Resolved:
    """One frozen configuration."""

    args: LlmArgs
    server: ServerOptions
    origins: dict[str, str]
    """Where each dotted key was set: `config.yml:12`, `--tp_size`, `--set`, `argument`."""
    notes: tuple[Note, ...] = ()

    def origin(self, path: str) -> str:
        """Where a key, or the object that held it, was set; `derived` when another setting implied it."""
        label = self.origins.get(path, "")
        # A file names every key it sets; `--set` and arguments may hold a whole object.
        whole = label or _nearest(self.origins, path)
        return label or (whole if whole in ("--set", "argument") else "derived")

    def take_effect(self) -> None:
        """Set the variables of `env_overrides`, before anything reads them, and log what the user should know."""
        env.apply_overrides(self.args.env_overrides)
        self.log_notes()

    def log_notes(self) -> None:
        """Log what the user should know, one line each."""
        levels = {"warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
        for note in self.notes:
            _LOGGER.log(levels[note.level], "%s", note)


@dataclass(slots=True)
class _Draft:
    """Values on their way to validation, and where each was written."""

    document: Document
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    server: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])

    def placed(self, problem: Problem) -> Problem:
        if problem.source:
            return problem
        below = next((label for path, label in self.origins.items() if _covers(problem.path, path)), "")
        return replace(problem, source=_nearest(self.origins, problem.path) or below or self.document.name)


def resolve(
    *,
    config: str | Path | None = None,
    flags: Mapping[str, Typed] | None = None,
    server_flags: Mapping[str, Typed] | None = None,
    sets: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    needs_model: bool = True,
    refuse_missing_features: bool = True,
    for_this_machine: bool = True,
) -> Resolved:
    """Resolve a configuration; every problem that can be seen is reported at once.

    Lowest first: defaults, `arguments` (keywords of the Python API) or the YAML file `config`, `flags`
    (dotted key -> what was typed), `sets` (`PATH=YAML` each). Only keys that were set override, never
    the defaults of an object. A flag that contradicts the file is an error unless `sets` decides.
    `for_this_machine` also checks its memory and disks.

    Raises:
        ConfigError: with a line for each problem.
    """
    assert config is None or arguments is None, "the Python API has no file"
    draft = _Draft(read_document(config) if config is not None else Document("", {}))
    _take_file(draft)
    for name, value in (arguments or {}).items():
        draft.values[LlmArgs.ALIASES.get(name, name)] = value.thaw_copy() if isinstance(value, ConfigModel) else value
        draft.origins[LlmArgs.ALIASES.get(name, name)] = "argument"
    settings = _parse_sets(draft, sets)
    for path, typed in (flags or {}).items():
        _take_flag(draft, path, typed, decided=any(_covers(setting, path) for setting in settings))
    for path, value in settings.items():
        _put(draft.values, path, value, replaces=True)
        draft.origins = {key: label for key, label in draft.origins.items() if not _covers(path, key)}
        draft.origins[path] = "--set"
    for name, typed in (server_flags or {}).items():
        _take_server_flag(draft, name, typed)
    args = _validate(draft, LlmArgs, draft.values)
    server = _validate(draft, ServerOptions, draft.server)
    if args is not None and needs_model and not args.model:
        draft.problems.append(Problem("model", "required: give MODEL, or the key in the file"))
    if args is None or server is None:
        raise ConfigError(_ordered(draft))
    draft.problems += [draft.placed(problem) for problem in contradictions(args)]
    if for_this_machine:
        draft.problems += [draft.placed(problem) for problem in what_this_machine_lacks(args)]
    if refuse_missing_features:
        missing = [*refuse_unbuilt(args), *refuse_unbuilt_server(server)]
        draft.problems += [draft.placed(problem) for problem in missing]
    if draft.problems:
        raise ConfigError(_ordered(draft))
    notes = (*settle_consequences(args), *traps(args, server), *without_effect(args))
    return Resolved(args.freeze(), server.freeze(), draft.origins, notes)


def _take_file(draft: _Draft) -> None:
    document = draft.document
    for name, value in document.values.items():
        if name in SERVER_YAML_KEYS:
            draft.server[name] = value
            continue
        known = LlmArgs.ALIASES.get(name, name)
        if known != name and known in document.values:
            message = f"another spelling of {known}, which is set too: keep one"
            draft.problems.append(Problem(name, message, document.where(name)))
        draft.values[known] = value
    for path, line in document.lines.items():
        head = path.split(".", 1)[0].split("[", 1)[0]
        known = LlmArgs.ALIASES.get(head, head) + path[len(head) :]
        draft.origins[known] = f"{document.name}:{line}"
    for path in python_only_keys(LlmArgs):
        if _get(draft.values, path) is not None:
            message = "holds a Python object: it can only be set through the Python API"
            draft.problems.append(Problem(path, message, document.where(path)))


def python_only_keys(cls: type[ConfigModel], prefix: str = "") -> Iterator[str]:
    """Dotted keys that no file can hold."""
    for name, field_info in cls.model_fields.items():
        if label_of(field_info, "python_only"):
            yield prefix + name
        for child in model_classes(field_info.annotation):
            yield from python_only_keys(cast("type[ConfigModel]", child), f"{prefix}{name}.")


def _parse_sets(draft: _Draft, sets: Sequence[str]) -> dict[str, Any]:
    """`PATH=YAML` texts by path; the last one of a path wins."""
    found: dict[str, Any] = {}
    for text in sets:
        path, equals, written = text.partition("=")
        path = path.strip()
        head, dot, rest = path.partition(".")
        path = LlmArgs.ALIASES.get(head, head) + dot + rest
        if not equals or not all(path.split(".")):
            draft.problems.append(Problem("", f"expected PATH=VALUE, got '{text}'", "--set"))
            continue
        if any(_covers(refused, path) for refused in SET_REFUSED):
            draft.problems.append(Problem(path, "can't be changed with --set", "--set"))
            continue
        try:
            found[path] = parse_value(written)
        except ValueError as error:
            draft.problems.append(Problem(path, str(error), "--set"))
    for path in found:
        for other in found:
            if other != path and _covers(path, other):
                draft.problems.append(Problem(other, f"--set also replaces {path} as a whole: keep one", "--set"))
    return found


def _take_flag(draft: _Draft, path: str, typed: Typed, *, decided: bool) -> None:
    written = _get(draft.values, path)
    if written is not None and not _same(written, typed.value) and not decided:
        draft.problems.append(_conflict(draft, path, typed, written))
    _put(draft.values, path, typed.value, replaces=False)
    draft.origins[path] = typed.label


def _take_server_flag(draft: _Draft, name: str, typed: Typed) -> None:
    written = draft.server.get(name)
    if written is not None and not _same(written, typed.value):
        draft.problems.append(_conflict(draft, name, typed, written))
    draft.server[name] = typed.value
    draft.origins[name] = typed.label


def _conflict(draft: _Draft, path: str, typed: Typed, written: Any) -> Problem:
    where = _nearest(draft.origins, path)
    remedy = "remove one of them" if path in SET_REFUSED else f"remove one of them, or decide with --set {path}=VALUE"
    return Problem(path, f"{typed.label} says {_plain(typed.value)} but {where} says {_plain(written)}: {remedy}")


def _validate(draft: _Draft, cls: type[_Model], values: dict[str, Any]) -> _Model | None:
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        draft.problems += [draft.placed(problem) for problem in problems_from(error, cls)]
        return None


def _ordered(draft: _Draft) -> list[Problem]:
    """Problems in the file's order, then the others; each once."""
    return sorted(dict.fromkeys(draft.problems), key=lambda problem: draft.document.line(problem.path))


def _covers(parent: str, path: str) -> bool:
    return path == parent or path.startswith((f"{parent}.", f"{parent}["))


def _nearest(origins: Mapping[str, str], path: str) -> str:
    return origins.get(nearest(origins, path), "")


def _get(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted key, None when it or anything above it is missing."""
    held: Any = values
    for part in path.split("."):
        if isinstance(held, ConfigModel):
            held = held.__dict__.get(part) if part in held.model_fields_set else None
        elif isinstance(held, Mapping):
            held = cast("Mapping[str, Any]", held).get(part)
        else:
            return None
    return held


def _put(values: dict[str, Any], path: str, value: Any, *, replaces: bool) -> None:
    """Store at a dotted key, beside what is already there.

    A parent that is no mapping gives way to `--set` (`replaces`); under a flag it stays, and validation refuses it.
    """
    *parents, name = path.split(".")
    held = values
    for parent in parents:
        below = held.get(parent)
        if isinstance(below, Mapping):
            held[parent] = dict(cast("Mapping[str, Any]", below))
        elif below is None or replaces:
            held[parent] = {}
        else:
            return
        held = cast("dict[str, Any]", held[parent])
    held[name] = value


def _same(written: Any, typed: Any) -> bool:
    """Whether a YAML value and a typed one mean the same; spelling of text and numbers does not matter."""
    if written == typed:
        return True
    first, second = _plain(written).lower(), _plain(typed).lower()
    try:
        return float(first) == float(second)
    except ValueError:
        return first == second


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
