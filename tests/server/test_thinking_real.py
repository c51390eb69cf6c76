"""A budget of reasoning against `headrace serve smollm2`, whose marks are ordinary text."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from .test_real import QUESTION, Real
from .test_service import until


@pytest.mark.slow
def test_exactly_the_budget_then_the_answer(tmp_path: Path, smollm2_path: Path) -> None:
    server = Real(tmp_path / "log", max_kv_tokens=4096, flags=("--reasoning_parser", "deepseek_r1"))
    try:
        assert until(server.is_ready, timeout_s=120)
        body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 60, "temperature": 1, "seed": 5, "n": 3,
                "thinking_token_budget": 5, "guided_regex": "[0-9]{4}", "return_token_ids": True}  # fmt: skip
        said = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "</think>"}, timeout=60).json()["tokens"]
    finally:
        server.process.terminate()
        server.process.wait(20)
    for choice in said["choices"]:
        assert choice["token_ids"][5 : 5 + len(ids)] == ids
        message = choice["message"]
        assert len(message["content"]) == 4 and message["content"].isdecimal() and message["reasoning_content"]
    assert said["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * (5 + len(ids))
