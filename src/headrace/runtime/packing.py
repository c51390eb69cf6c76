"""A model source as plain values, for a child process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config.llm_args import LlmArgs
from headrace.hub.source import ModelSource


def pack_source(source: ModelSource) -> dict[str, str | None]:
    return {
        "kind": source.kind,
        "path": str(source.path),
        "name": source.name,
        "alias": source.alias,
        "revision": source.revision,
    }


def unpack_source(fields: dict[str, Any]) -> ModelSource:
    return ModelSource(
        kind=fields["kind"],
        path=Path(fields["path"]),
        name=fields["name"],
        alias=fields["alias"],
        revision=fields["revision"],
    )


def pack_args(args: LlmArgs) -> dict[str, Any]:
    """Only what was set: defaults are the child's own."""
    return args.model_dump(mode="json", exclude_unset=True)


def unpack_args(fields: dict[str, Any]) -> LlmArgs:
    return LlmArgs.model_validate(fields)
