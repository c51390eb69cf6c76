"""Reading a YAML file with the line of every key, so that a problem can be shown where it was written."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from headrace.config.errors import ConfigError, Problem, join

_MAX_DEPTH = 30
_MAX_KEYS = 100_000


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML mapping and where its keys stand."""

    name: str
    """File name as the user wrote it."""
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict[str, int])
    """Line (from 1) of each dotted key; list items as `key[0]`."""

    def where(self, path: str) -> str:
        """`file:line` of a key or of the nearest mapping above it."""
        path = nearest(self.lines, path)
        return f"{self.name}:{self.lines[path]}" if path else self.name

    def line(self, path: str) -> int:
        """Line of a key or of the nearest mapping above it; past every line when the file does not have it."""
        return self.lines.get(nearest(self.lines, path), 1 << 30)


def nearest(known: Container[str], path: str) -> str:
    """A dotted key, or the closest one above it that is known; '' if none is."""
    while path and path not in known:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return path


def read_document(path: str | Path) -> Document:
    """The mapping in a YAML file; an empty file is an empty mapping. ConfigError names what is wrong with the file."""
    name = str(path)
    if not name:  # an unset variable of a shell; pathlib would take it for the current folder
        raise ConfigError(Problem("", "the file's name is empty: give its path"))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(Problem("", "no such file", name)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem("", f"can't be read: {_reason(error)}", name)) from None
    return parse_document(text, name=name)


def parse_document(text: str, *, name: str) -> Document:
    """The mapping in YAML text; `name` stands for the file in messages."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a character that YAML doesn't have
        raise ConfigError(Problem("", f"not valid YAML: {_reason(error)}", name)) from None
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(name, {})
        lines: dict[str, int] = {}
        _index(node, "", lines, name=name)
        value = cast("Any", loader.construct_document(node))  # pyright: ignore[reportUnknownMemberType]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(Problem("", f"not valid YAML: {error.problem or error.context}", where)) from None
    except RecursionError:
        raise ConfigError(Problem("", "nested too deeply", name)) from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(Problem("", f"not valid YAML: {_reason(error)}", name)) from None
    finally:
        loader.dispose()  # pyright: ignore[reportUnknownMemberType]
    if value is None:
        return Document(name, {})
    if not isinstance(value, dict):
        raise ConfigError(Problem("", "the file has to hold a mapping (lines of `key: value`)", name))
    values = cast("dict[Any, Any]", value)
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(Problem(str(key), "keys have to be text", f"{name}:{lines.get(str(key), 1)}"))
    return Document(name, values, lines)


def parse_value(text: str) -> Any:
    """A YAML value as written after `--set PATH=`. ValueError if it is not YAML."""
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("not a YAML value: nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not a YAML value: {_reason(error)}") from None


def _index(node: yaml.Node, path: str, lines: dict[str, int], *, name: str) -> None:
    """Record the line of every key below `node`; a key written twice is an error, not a silent choice."""
    if path.count(".") + path.count("[") > _MAX_DEPTH:
        raise ConfigError(Problem("", "nested too deeply, or an anchor that contains itself", name))
    if len(lines) > _MAX_KEYS:
        message = f"more than {_MAX_KEYS} keys and items, those of anchors counted at each use"
        raise ConfigError(Problem("", message, name))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(key_node.value)
            child = join(path, key)
            if key in seen:
                message = f"written twice (first in line {lines[child]}): keep one"
                raise ConfigError(Problem(child, message, f"{name}:{line}"))
            seen.add(key)
            lines[child] = line
            _index(value_node, child, lines, name=name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(cast("list[yaml.Node]", node.value)):
            lines[f"{path}[{index}]"] = item.start_mark.line + 1
            _index(item, f"{path}[{index}]", lines, name=name)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
