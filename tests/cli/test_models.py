"""`headrace models`: the page in docs is what it prints, and no row is without a test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.cli.main import run
from headrace.cli.models import HEADER, architectures, page
from headrace.engine.build import known_model_types

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    stored = (ROOT / "docs" / "models.md").read_text()
    assert stored == page() + "\n", "run: headrace models > docs/models.md"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    assert capsys.readouterr().out == page() + "\n"


def test_every_model_type_has_one_row() -> None:
    rows = architectures()
    assert {len(row) for row in rows} == {len(HEADER)}
    assert [row[0].strip("`") for row in rows[:-1]] == sorted(known_model_types())


def test_no_row_without_a_test() -> None:
    assert untested(known_model_types()) == []


def test_a_row_without_a_test_is_found() -> None:
    """Of a type that none of the kit's lists has, whatever test files say otherwise."""
    found = untested(["llama", "no_such_type", "qwen3_5", "kimi_k2", "full_attention", "kimi_k3"])
    assert found == ["no_such_type", "full_attention"]


def untested(model_types: Iterable[str]) -> list[str]:
    """Those that none of the lists has by which the kit's checks are parametrised: causal types that transformers can
    compute, multimodal ones, and those that have a reference of their own."""
    from transformers import CONFIG_MAPPING

    from tests.kits.tiny import WRAPPERS, tiny_model
    from tests.models.test_contract import MODEL_TYPES
    from tests.models.test_kimi_k3 import REFERENCES

    def is_known(model_type: str) -> bool:
        return (tiny_model(model_type).oracle or model_type) in CONFIG_MAPPING

    causal = {model_type for _, model_type in MODEL_TYPES if is_known(model_type)}
    multimodal = {wrapper for wrapper, text in WRAPPERS.items() if text in causal}
    return [model_type for model_type in model_types if model_type not in causal | multimodal | REFERENCES.keys()]
