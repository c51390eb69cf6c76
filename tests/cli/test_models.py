"""`headrace models`: the page in docs is what it prints, and no row is without a test."""

from __future__ import annotations

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
    """The contract runs over every causal type; a multimodal wrapper is tested by name in a file of its own."""
    from tests.models.test_contract import MODEL_TYPES, NOT_CAUSAL

    tested = {model_type for _, model_type in MODEL_TYPES}
    sources = {path.name: path.read_text() for path in (ROOT / "tests" / "models").glob("test_*.py")}
    del sources["test_contract.py"]
    for model_type in known_model_types():
        if model_type not in tested:
            assert model_type in NOT_CAUSAL
            assert any(f'"{model_type}"' in text for text in sources.values()), f"{model_type} has no test"
