"""The tables of names: what they say Headrace has, it has; what they say isn't built, isn't, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from .names import exists, is_built
from .terminal import ROOT

PAGES = ("moving-from-tensorrt-llm.md", "moving-from-vllm.md")


@dataclass(frozen=True)
class Row:
    line: int
    command: str
    """Whose flags these are."""
    theirs: list[str]
    ours: list[str]
    note: str


def rows_of(page: str) -> list[Row]:
    """Of tables whose second column is Headrace's."""
    found: list[Row] = []
    command: str | None = None
    for line, text in enumerate((ROOT / "docs" / page).read_text().splitlines(), 1):
        if not text.startswith("|"):
            command = None
            continue
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        if command is None:
            assert cells[1] == "Headrace" or cells[1].startswith("`headrace "), f"{page}:{line}: {cells[1]}"
            command = "serve" if cells[1] == "Headrace" else cells[1].strip("`").removeprefix("headrace ")
        elif not set(text) <= set("|- "):
            theirs, ours = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
            assert bool(ours) is (cells[1] != "-"), f"{page}:{line}: say - where there is nothing"
            ours += re.findall(r"`((?:--|GET |POST )[^`]+)`", cells[2])
            found.append(Row(line, command, theirs, ours, cells[2]))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_ours_exists(page: str) -> None:
    rows = rows_of(page)
    assert len(rows) > 60
    missing = [f"{page}:{row.line}: {name}" for row in rows for name in row.ours if not exists(name, row.command)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_built_is_said_and_nothing_else(page: str) -> None:
    wrong: list[str] = []
    for row in rows_of(page):
        said = "not built" in row.note
        wrong += [f"{page}:{row.line}: {name}" for name in row.ours if is_built(name, row.command) is said]
    assert not wrong


def test_the_tables_are_whole() -> None:
    """Every flag of the server and every method of LLM that TensorRT-LLM has too stands in its table."""
    rows = rows_of(PAGES[0])
    shown = {name for row in rows for name in row.ours}
    assert {"--tp_size", "LLM.generate", "kv_cache_config", "POST /v1/chat/completions"} <= shown
    same = [row for row in rows if row.command == "serve" and row.ours and row.ours[0].startswith("--")]
    assert sum(len(row.theirs) for row in same) > 60
