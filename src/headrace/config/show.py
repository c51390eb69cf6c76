"""The resolved configuration as text that can be read back with `--config`, with the origin of each setting."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml

from headrace.config.base import ConfigModel, default_of
from headrace.config.errors import join
from headrace.config.kernels import EncodeCudaGraphConfig
from headrace.config.llm_args import HIDDEN, LlmArgs
from headrace.config.resolution import Resolved, python_only_keys

_SECRET = re.compile(r"token|key|secret|password|credential", re.IGNORECASE)


def changed_keys(model: ConfigModel, prefix: str = "") -> dict[str, Any]:
    """Dotted keys whose values differ from their defaults, in the order of the classes."""
    found: dict[str, Any] = {}
    for name, value in model.__dict__.items():
        default = default_of(type(model), name)
        path = join(prefix, name)
        if value == default:
            continue
        if isinstance(value, ConfigModel):
            below = changed_keys(value, path)
            if type(value) is not type(default) and not below:
                found[path] = plain(value)
            found |= below
        else:
            found[path] = plain(value)
    return found


def plain(value: Any) -> Any:
    """A value as YAML and JSON know it; Python objects become their class name in brackets."""
    if isinstance(value, ConfigModel):
        return {name: plain(item) for name, item in value.__dict__.items()}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in cast("set[Any]", value))
    return f"<{type(value).__name__}>"


def as_dict(args: LlmArgs, *, everything: bool = False) -> dict[str, Any]:
    """The settings as nested plain values: what differs from the defaults, or everything. Secrets are hidden."""
    if everything:
        values = cast("dict[str, Any]", plain(args))
        for path in python_only_keys(type(args)):
            _drop_null(values, path)
    else:
        values: dict[str, Any] = {}
        for path, value in changed_keys(args).items():
            _nest(values, path, value)
        _add_discriminators(args, values)
    if args.env_overrides:
        hidden = {name: HIDDEN if _SECRET.search(name) else text for name, text in args.env_overrides.items()}
        values["env_overrides"] = hidden
    return values


def as_json(resolved: Resolved, *, everything: bool = False) -> str:
    """The configuration as JSON: `config`, and `origins` of the settings that differ from their defaults."""
    origins = {path: resolved.origin(path) for path in changed_keys(resolved.args)}
    return json.dumps({"config": as_dict(resolved.args, everything=everything), "origins": origins}, indent=2)


def as_yaml(resolved: Resolved, *, everything: bool = False) -> str:
    """The configuration as YAML; a comment behind each setting that is not a default says where it comes from."""
    changed = changed_keys(resolved.args).keys()
    lines = list(_lines(as_dict(resolved.args, everything=everything), "", resolved, changed))
    return "\n".join(lines) + "\n" if lines else "{}  # all settings have their defaults\n"


def _lines(values: Mapping[Any, Any], prefix: str, resolved: Resolved, changed: Any, indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        path = join(prefix, str(name))
        mark = f"  # {resolved.origin(path)}" if path in changed else ""
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_scalar(name)}:{mark}"
            yield from _lines(cast("Mapping[Any, Any]", value), path, resolved, changed, indent + "  ")
        else:
            yield f"{indent}{_scalar(name)}: {_scalar(value)}{mark}"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 30, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _nest(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[name] = value


def _drop_null(values: dict[str, Any], path: str) -> None:
    *parents, name = path.split(".")
    held: Any = values
    for parent in parents:
        held = cast("dict[str, Any]", held).get(parent) if isinstance(held, dict) else None
    if isinstance(held, dict) and cast("dict[str, Any]", held).get(name, "") is None:
        del held[name]


def _add_discriminators(model: ConfigModel, values: dict[str, Any]) -> None:
    """A kind (`decoding_type`, `algorithm`, `mode`) equals its class's default, but a reader needs it."""
    for name, below in values.items():
        held = model.__dict__.get(name)
        if not isinstance(held, ConfigModel) or not isinstance(below, dict):
            continue
        inner = cast("dict[str, Any]", below)
        for kind in ("decoding_type", "algorithm"):
            if kind in type(held).model_fields and kind not in inner:
                values[name] = {kind: held.__dict__[kind], **inner}
        if isinstance(held, EncodeCudaGraphConfig):
            values[name] = {"mode": held.mode, **inner}
        _add_discriminators(held, cast("dict[str, Any]", values[name]))
