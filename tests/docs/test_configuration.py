"""docs/configuration.md is what the classes say today."""

from __future__ import annotations

import config_reference
import pytest

from headrace.config.llm_args import LlmArgs
from headrace.config.serving import ServerOptions


def test_the_page_is_current() -> None:
    stored = config_reference.PAGE.read_text(encoding="utf-8")
    assert stored == config_reference.page(), "run: python tools/config_reference.py"


def test_every_key_has_its_row() -> None:
    page = config_reference.page()
    for name in (*LlmArgs.model_fields, *ServerOptions.model_fields):
        assert f"\n| `{name}` |" in page, name


def test_a_row_tells_all_of_a_key() -> None:
    flags = {"max_batch_size": ["--max_batch_size"]}
    key, value, default, flag, meaning = config_reference.row(LlmArgs, "max_batch_size", "max_batch_size", flags)
    assert (key, value, default, flag) == ("`max_batch_size`", "a whole number ≥ 1", "`2048`", "`--max_batch_size`")
    assert meaning == "Most sequences in a step."


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("batched_logits_processor", "*Not built: "),
        ("sampler_type", "*No effect: ignored.*"),
        ("dtype", "*Works: `auto`"),
    ],
)
def test_what_does_not_work_is_said(name: str, said: str) -> None:
    assert said in config_reference.row(LlmArgs, name, name, {})[-1]
