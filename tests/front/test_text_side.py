"""Tokenizer and template, loaded together."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.front.text_side import load_text_side
from headrace.hub.source import ModelSource
from headrace.text.tokenizer import ByteTokenizer


@pytest.mark.parametrize(("template", "is_told"), [("<|other|>{{ messages }}", True), ("{{ messages }}", False)])
def test_a_template_of_another_tokenizer_is_told(
    tmp_path: Path, template: str, is_told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "fake"}))
    args = LlmArgs(model=str(tmp_path), tokenizer=ByteTokenizer())
    source = ModelSource(kind="hf", path=tmp_path, name="m")
    side = load_text_side(args, source, chat_template=template)
    assert side.template is not None and side.template.source == template
    assert ("no token of this tokenizer: <|other|>" in caplog.text) is is_told
