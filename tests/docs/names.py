"""The names that Headrace has: what tables of names in the documentation are held to."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
from pydantic import BaseModel

import headrace
from headrace import env
from headrace.cli.main import cli
from headrace.cli.options import LLM_FLAGS, SERVER_FLAGS, SERVING_LLM_FLAGS
from headrace.config.errors import leaf_paths, model_classes
from headrace.config.llm_args import LlmArgs
from headrace.config.serving import SERVER_YAML_KEYS
from headrace.config.unbuilt import BUILT_VALUES, UNBUILT, UNBUILT_SERVER
from headrace.server.openapi import BODIES
from tests.deploy.exporter import exported
from tests.server.harness import running

_FLAGS = (*LLM_FLAGS, *SERVING_LLM_FLAGS, *SERVER_FLAGS)


@functools.cache
def operations() -> frozenset[str]:
    """`GET /health` and all others of the OpenAPI document."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as server:
        paths: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    return frozenset(f"{method.upper()} {path}" for path, methods in paths.items() for method in methods)


@functools.cache
def metrics() -> frozenset[str]:
    with tempfile.TemporaryDirectory() as folder:
        lines = exported(Path(folder)).splitlines()
    return frozenset(line.split()[2] for line in lines if line.startswith("# TYPE "))


@functools.cache
def flags(command: str) -> frozenset[str]:
    """Of `serve`, `bench throughput`, ...; with two dashes, in both spellings."""
    found: click.Command = cli
    words = command.split()
    ctx = click.Context(cli)
    while words:
        assert isinstance(found, click.Group), f"{command}: {found.name} has no commands"
        inner = found.get_command(ctx, words.pop(0))
        assert inner is not None, f"headrace {command} is no command"
        found = inner
    names = {name for param in found.params for name in (*param.opts, *param.secondary_opts)}
    return frozenset(names | {name.replace("_", "-") for name in names})


@functools.cache
def config_keys() -> frozenset[str]:
    """Dotted keys of a `--config` file, those that hold others too."""
    leaves = {*leaf_paths(LlmArgs), *SERVER_YAML_KEYS}
    return frozenset(leaves | {key.rsplit(".", n)[0] for key in leaves for n in range(1, key.count(".") + 1)})


@functools.cache
def request_fields() -> frozenset[str]:
    return frozenset(name for body in set(BODIES.values()) for name in _fields_of(body))


def _fields_of(body: type[BaseModel]) -> Iterator[str]:
    for name, field in body.model_fields.items():
        yield field.alias or name
        for inner in model_classes(field.annotation):
            yield from (f"{name}.{key}" for key in inner.model_fields)


def is_python_name(name: str) -> bool:
    """`LLM.generate`, `headrace.config.KvCacheConfig`, `SamplingParams.top_k`."""
    module, _, rest = name.partition(".") if name.startswith("headrace.") else ("headrace", "", name)
    owner: Any = headrace if module == "headrace" else importlib.import_module(module)
    for part in rest.split("."):
        if hasattr(owner, part):
            owner = getattr(owner, part)
        elif part in _declared(owner):
            return True
        else:
            try:
                owner = importlib.import_module(f"{owner.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
    return True


def _declared(owner: Any) -> set[str]:
    known = {*getattr(owner, "model_fields", {}), *getattr(owner, "__annotations__", {})}
    return known | set(getattr(owner, "__slots__", ()))


def exists(name: str, command: str = "serve") -> bool:
    """Whether Headrace has what a table says in code font; its form tells the kind."""
    word = name.split()[0]
    if word in ("GET", "POST", "DELETE"):
        return name in operations()
    if word == "headrace":
        return bool(flags(name.removeprefix("headrace ").replace("serve embeddings", "serve")))
    if word.startswith("--"):
        return word.partition("=")[0] in flags(command)
    if word.startswith("trtllm_"):
        return word in metrics()
    if word.isupper() and "_" in word:
        return word in {variable.name for variable in env.VARIABLES}
    if word[0].isupper() or word.startswith("headrace."):
        return is_python_name(word.partition("(")[0])
    return word in config_keys() or word in request_fields()


def is_built(name: str, command: str = "serve") -> bool | None:
    """Whether a flag or a key does what it says; None where only some of its values do, or it is neither."""
    if name.startswith("--"):
        of_flag = {f"--{spelling}": flag.path for flag in _FLAGS for spelling in (*flag.names, flag.off)}
        path = of_flag.get(name)
    else:
        path = name if name in config_keys() else None
    if path is None or path in BUILT_VALUES or (command != "serve" and path not in UNBUILT) or path == "grpc_protocol":
        return None
    parts = path.split(".")
    return not any(".".join(parts[: n + 1]) in {*UNBUILT, *UNBUILT_SERVER} for n in range(len(parts)))
