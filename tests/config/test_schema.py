from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pydantic
import pytest
import yaml

from headrace.config.llm_args import LlmArgs
from headrace.config.schema import disagg_schema, llm_schema, schema_text
from headrace.config.serving import SERVER_YAML_KEYS
from tests.config.test_documents import BLOCKS, ORCHESTRATOR

FOLDER = Path(__file__).parents[2] / "schemas"
SCHEMAS = {"llm.json": llm_schema, "disagg.json": disagg_schema}


OLD_PYDANTIC = tuple(int(part) for part in pydantic.VERSION.split(".")[:2]) < (2, 10)


@pytest.mark.skipif(OLD_PYDANTIC, reason="older versions write the same schema in another form")
@pytest.mark.parametrize("name", SCHEMAS)
def test_committed_schemas_are_current(name: str) -> None:
    """After a change: headrace config schema llm --output schemas/llm.json (and the same for disagg)."""
    assert json.loads((FOLDER / name).read_text(encoding="utf-8")) == json.loads(schema_text(SCHEMAS[name]()))


@pytest.mark.skipif(OLD_PYDANTIC, reason="older versions write the same schema in another form")
def test_the_schema_has_every_key_a_file_may_have() -> None:
    properties = llm_schema()["properties"]
    python_only = {"checkpoint_loader", "mpi_session", "batched_logits_processor"}
    assert properties.keys() == set(LlmArgs.model_fields) - python_only | {"hf_revision", *SERVER_YAML_KEYS}
    for name, entry in properties.items():
        assert entry["description"], name
        assert entry["status"] in ("stable", "beta", "prototype", "deprecated"), name
    assert properties["decoding_config"]["deprecated"]


def test_groups_of_a_disaggregated_service_take_engine_keys() -> None:
    schema = disagg_schema()
    group = schema["$defs"]["ServerGroupConfig"]["properties"]
    assert {"num_instances", "urls", "router", "max_batch_size", "kv_cache_dtype"} <= group.keys()
    assert {"hostname", "context_servers", "max_batch_size", "free_gpu_memory_fraction"} <= schema["properties"].keys()
    assert "llm" not in group


def references(part: Any) -> set[str]:
    if isinstance(part, dict):
        entries = cast("dict[str, Any]", part)
        own = {entries["$ref"]} if isinstance(entries.get("$ref"), str) else set[str]()
        return own.union(*(references(item) for item in entries.values()))
    if isinstance(part, list):
        return set[str]().union(*(references(item) for item in cast("list[Any]", part)))
    return set()


@pytest.mark.parametrize("name", SCHEMAS)
def test_references_lead_somewhere(name: str) -> None:
    schema = SCHEMAS[name]()
    assert {reference.rsplit("/", 1)[-1] for reference in references(schema)} <= schema["$defs"].keys()


@pytest.mark.parametrize("name", [name for name, (text, _) in BLOCKS.items() if text != ORCHESTRATOR])
def test_the_documents_files_pass_the_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(yaml.safe_load(BLOCKS[name][0].replace("16 or 32", "16")) or {}, llm_schema())


def test_an_orchestrator_file_passes_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(yaml.safe_load(ORCHESTRATOR), disagg_schema())
    bad = {"context_servers": {"max_batch_sise": 1}}
    with pytest.raises(jsonschema.ValidationError, match="max_batch_sise"):
        jsonschema.validate(bad, disagg_schema())


@pytest.mark.parametrize("bad", [{"max_batch_size": "x"}, {"kv_cache_config": {"dtyp": "fp8"}}, {"model_impl": "rust"}])
def test_mistakes_fail_the_schema(bad: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, llm_schema())


def test_nulls_that_mean_the_default_pass_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(
        json.loads('{"max_batch_size": null, "multimodal_config": null, "max_seq_len": "auto"}'), llm_schema()
    )
