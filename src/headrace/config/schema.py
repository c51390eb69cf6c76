"""JSON Schemas of the YAML files, so that an editor can complete keys, show meanings and mark mistakes."""

from __future__ import annotations

import json
from typing import Any, cast

from headrace.config.base import ConfigModel
from headrace.config.disagg import FLAT_ALIASES, DisaggConfig
from headrace.config.llm_args import NULL_RESETS, LlmArgs
from headrace.config.serving import SERVER_YAML_KEYS, ServerOptions

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def llm_schema() -> dict[str, Any]:
    """The schema of a `--config` file: LlmArgs and the keys that only the server reads."""
    schema = _schema_of(LlmArgs)
    server = _schema_of(ServerOptions)
    properties = cast("dict[str, Any]", schema["properties"])
    properties |= {name: server["properties"][name] for name in SERVER_YAML_KEYS}
    schema["$defs"] |= server["$defs"]
    schema["properties"] = properties
    return _titled(schema, "Headrace configuration")


def disagg_schema() -> dict[str, Any]:
    """The schema of a disaggregated service's file; keys of LlmArgs stand at the top level and in both groups."""
    schema = _schema_of(DisaggConfig)
    definitions = cast("dict[str, Any]", schema["$defs"])
    llm = cast("dict[str, Any]", definitions.pop("LlmArgs"))["properties"]
    short = {name: {"description": f"Short for {path}."} for name, path in FLAT_ALIASES.items()}
    group = cast("dict[str, Any]", definitions["ServerGroupConfig"])["properties"]
    del group["llm"]
    for properties in (schema["properties"], group):
        properties |= {name: part for name, part in {**llm, **short}.items() if name not in properties}
    return _titled(schema, "Headrace disaggregated service")


def schema_text(schema: dict[str, Any]) -> str:
    """A schema as it is written to a file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _schema_of(cls: type[ConfigModel]) -> dict[str, Any]:
    schema = cls.model_json_schema(by_alias=False)
    definitions = cast("dict[str, dict[str, Any]]", schema.setdefault("$defs", {}))
    for part in (schema, *definitions.values()):
        properties = cast("dict[str, dict[str, Any]]", part.get("properties", {}))
        for name in [name for name, entry in properties.items() if entry.get("python_only")]:
            del properties[name]
        for entry in properties.values():
            entry.pop("title", None)
            if "$ref" in entry:  # pydantic leaves out a meaning that equals its class's
                entry.setdefault("description", definitions[entry["$ref"].rsplit("/", 1)[-1]]["description"])
            if entry.get("status") == "deprecated":
                entry["deprecated"] = True
    _accept_other_spellings(cls, schema)
    return cast("dict[str, Any]", _any_kind(schema))


def _any_kind(part: Any) -> Any:
    """Kinds told apart by which keys are there may overlap, which `oneOf` would refuse."""
    if isinstance(part, dict):
        entries = cast("dict[str, Any]", part)
        overlap = "oneOf" in entries and "discriminator" not in entries
        return {"anyOf" if overlap and key == "oneOf" else key: _any_kind(item) for key, item in entries.items()}
    return [_any_kind(item) for item in cast("list[Any]", part)] if isinstance(part, list) else part


def _accept_other_spellings(cls: type[ConfigModel], schema: dict[str, Any]) -> None:
    """What validators accept beyond the declared types: aliases, null for a default, sizes as text."""
    for part in (schema, schema["$defs"].get("LlmArgs", {})):
        properties = cast("dict[str, dict[str, Any]]", part.get("properties", {}))
        if "max_batch_size" not in properties or "model" not in properties:
            continue
        for name in (*NULL_RESETS, "multimodal_config"):
            entry = properties[name]
            kept = {key: entry.pop(key) for key in ("type", "minimum", "$ref", "allOf") if key in entry}
            entry["anyOf"] = [kept, {"type": "null"}]
        properties["hf_revision"] = properties["revision"]
        properties["tokenizer"] |= {"type": ["string", "null"]}
        properties["env_overrides"] = {
            **{key: value for key, value in properties["env_overrides"].items() if key != "anyOf"},
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
                {"type": "null"},
            ],
        }
    size = schema["$defs"].get("MultimodalConfig", {}).get("properties", {}).get("encoder_cache_max_bytes")
    if size is not None:
        size["type"] = ["integer", "string"]


def _titled(schema: dict[str, Any], title: str) -> dict[str, Any]:
    return {"$schema": _DIALECT, "title": title, **{key: part for key, part in schema.items() if key != "title"}}
