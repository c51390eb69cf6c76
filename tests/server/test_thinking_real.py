"""A budget of reasoning against `headrace serve smollm2`, whose marks are ordinary text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .harness import events_of
from .test_real import QUESTION, Real
from .test_service import until

pytestmark = pytest.mark.slow

BUDGET = 5
CAPPED: dict[str, Any] = {"model": "smollm2", "temperature": 1, "seed": 5, "thinking_token_budget": BUDGET,
                          "return_token_ids": True, "guided_regex": "[0-9]{4}"}  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Real]:
    log = tmp_path_factory.mktemp("thinking") / "log"
    server = Real(log, max_kv_tokens=4096, flags=("--reasoning_parser", "deepseek_r1"))
    try:
        assert until(server.is_ready, timeout_s=120)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(20)


@pytest.fixture(scope="module")
def marker(real: Real) -> list[int]:
    return httpx.post(f"{real.url}/tokenize", json={"prompt": "</think>"}, timeout=60).json()["tokens"]


def post(real: Real, path: str, **body: Any) -> str:
    answer = httpx.post(f"{real.url}/v1/{path}", json={**CAPPED, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_exactly_the_budget_then_the_answer(real: Real, marker: list[int]) -> None:
    body = {"messages": QUESTION, "max_tokens": 60, "n": 3}
    said = json.loads(post(real, "chat/completions", **body))
    for choice in said["choices"]:
        assert choice["token_ids"][BUDGET : BUDGET + len(marker)] == marker
        message = choice["message"]
        assert len(message["content"]) == 4 and message["content"].isdecimal() and message["reasoning_content"]
    assert said["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * (BUDGET + len(marker))

    *chunks, end = events_of(
        post(real, "chat/completions", **body, stream=True, stream_options={"include_usage": True})
    )
    assert end == "[DONE]" and chunks[-1]["usage"] == {**said["usage"], "prompt_tokens_details": {
        "cached_tokens": chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]}}  # fmt: skip
    for choice in said["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [i for one in mine for i in one.get("token_ids", [])] == choice["token_ids"]
        for name in ("content", "reasoning_content"):
            assert "".join(one["delta"].get(name) or "" for one in mine) == choice["message"][name]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_every_api(real: Real, marker: list[int], stream: bool) -> None:
    def ids(text: str) -> list[int]:
        if not stream:
            answer = json.loads(text)
            return {**answer, **answer.get("choices", [{}])[0]}["token_ids"]
        found: list[int] = []
        for event in (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")):
            for told in (event, event.get("response", {}), *event.get("choices", ())):
                found += told.get("token_ids", [])
        return found

    thinks = {"type": "enabled", "budget_tokens": BUDGET}
    texts = {
        "responses": post(real, "responses", input="hi", max_output_tokens=60, stream=stream),
        "messages": post(real, "messages", messages=QUESTION, max_tokens=60, stream=stream, thinking=thinks),
        "completions": post(real, "completions", prompt="<think>", max_tokens=60, stream=stream, guided_regex=None),
    }
    for text in texts.values():
        assert ids(text)[BUDGET : BUDGET + len(marker)] == marker
    assert '"thinking' in texts["messages"] and '"reasoning' in texts["responses"]
