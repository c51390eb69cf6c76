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
    """Of a type that the contract would skip and no other file names."""
    assert untested(["llama", "no_such_type", "qwen3_5", "kimi_k2"]) == ["no_such_type"]


def untested(model_types: Iterable[str]) -> list[str]:
    """The contract runs over every causal type that transformers knows. Any other (a multimodal wrapper, one of no
    release) is held to something by name in a file of its own."""
    from transformers import CONFIG_MAPPING

    from tests.kits.tiny import tiny_model
    from tests.models.test_contract import MODEL_TYPES

    sources = {path.name: path.read_text() for path in (ROOT / "tests" / "models").glob("test_*.py")}
    del sources["test_contract.py"]
    checking = [text for text in sources.values() if "check_" in text or "assert_close(" in text]

    def is_tested(model_type: str) -> bool:
        in_contract = model_type in {name for _, name in MODEL_TYPES}
        if in_contract and (tiny_model(model_type).oracle or model_type) in CONFIG_MAPPING:
            return True
        return any(f'"{model_type}"' in text for text in checking)

    return [model_type for model_type in model_types if not is_tested(model_type)]
