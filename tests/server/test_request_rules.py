"""What operators may allow: templates of requests, fewer tokens than asked for, budgets of reasoning; and a client's
wish to be stopped while the model still thinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.server.rules import RequestRules

from .harness import MODEL, Server, events_of
from .test_tools import HI, Told, serving

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
RULES = RequestRules(thinking_budgets={"low": 7, "default": 9}, clamps_max_tokens=True, takes_templates=True)


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, told: Told) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("rules"), told, reasoning_parser="deepseek_r1", rules=RULES) as found:
        yield found


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, told: Told) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("strict"), told) as found:
        yield found


def post(server: Server, path: str = CHAT, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": MODEL, "messages": HI, **body}, timeout=30)


def test_budgets_reach_the_engine(server: Server, told: Told) -> None:
    told.says = "hm</think>yes"
    given: dict[int, dict[str, Any]] = {
        9: {},
        7: {"reasoning_effort": "low"},
        5: {"reasoning_effort": "low", "thinking_token_budget": 5},
        0: {"thinking_token_budget": 0, "n": 2},
    }
    for budget, fields in given.items():
        assert post(server, **fields).status_code == 200
        cap = told.requests[-1].thinking
        assert cap is not None and cap.max_tokens == budget and cap.is_open
        assert bytes(place[0] for place in cap.ends[0]) == b"</think>"
    thinking = {"type": "enabled", "budget_tokens": 4}
    assert post(server, MESSAGES, max_tokens=50, thinking=thinking).status_code == 200
    cap = told.requests[-1].thinking
    assert cap is not None and cap.max_tokens == 4
    for prompt, is_open in (("a <think> b", True), ("<think></think>", False), ([*b"<think>"], True)):
        assert post(server, "/v1/completions", messages=None, prompt=prompt, max_tokens=20,
                    thinking_token_budget=2).status_code == 200  # fmt: skip
        cap = told.requests[-1].thinking
        assert cap is not None and cap.is_open is is_open
    usage = post(server, thinking_token_budget=3).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("hm</think>")


def test_budgets_that_can_not_be_kept(server: Server, strict: Server) -> None:
    cases: list[tuple[Server, dict[str, Any], str]] = [
        (strict, {"thinking_token_budget": 5}, "--reasoning_parser"),
        (server, {"thinking_token_budget": 5, "max_tokens": 13}, "13 tokens"),
        (server, {"thinking_token_budget": 5, "use_beam_search": True, "n": 2}, "beam search"),
        (server, {"thinking_token_budget": "many"}, "integer"),
    ]
    for where, fields, text in cases:
        error = post(where, **fields).json()["error"]
        assert error["param"] == "thinking_token_budget" and text in error["message"], error
    said = post(server, MESSAGES, max_tokens=10, thinking={"type": "enabled", "budget_tokens": 10})
    assert said.status_code == 400 and said.json()["error"]["message"].startswith("thinking.budget_tokens 10")


def test_a_request_brings_its_template(server: Server, strict: Server, told: Told) -> None:
    template = "{% for m in messages %}<<{{ m.content }}>>{% endfor %}"
    assert post(server, chat_template=template).status_code == 200
    assert told.prompt == "<<hi>>"
    assert post(server, "/render", chat_template=template).json()["prompt"] == "<<hi>>"
    for source, text in (
        ("{% if %}", "line 1"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ 'a' * 10**10 }}", "limits"),
    ):
        answer = post(server, chat_template=source)
        assert answer.status_code == 400 and text in answer.json()["error"]["message"]
    assert post(strict, chat_template=template).status_code == 400
    assert post(server, chat_template_kwargs={"chat_template": "x"}).status_code == 400


def test_images_are_refused_in_each_apis_own_words(server: Server) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    block = [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]
    said = post(server, MESSAGES, messages=block, max_tokens=9).json()["error"]["message"]
    assert said.startswith("messages[0].content[1]: blocks of type 'image'") and "image_url" not in said
    part = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    error = post(server, "/v1/responses", messages=None, input=part).json()["error"]
    assert error["param"] == "input" and error["message"].startswith("input[0].content[0]: parts of type 'input_image'")


def test_fewer_tokens_than_asked_for(server: Server, strict: Server) -> None:
    assert post(strict, max_tokens=5000).json()["error"]["code"] == "context_length_exceeded"
    assert post(server, max_tokens=5000).status_code == 200
    too_long = [{"role": "user", "content": "x" * 5000}]
    assert post(server, messages=too_long, max_tokens=5).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_in_the_reasoning(server: Server, told: Told, stream: bool) -> None:
    told.says = "one. two</think>a. b"
    choice = post(server, stop=".").json()["choices"][0]
    assert choice["message"]["content"] == "a" and choice["message"]["reasoning_content"] == "one. two"
    if stream:
        text = post(server, stop=".", stop_in_reasoning=True, stream=True).text
        assert '"reasoning_content":"o' in text and "two" not in text and '"stop_reason":"."' in text
        return
    choice = post(server, stop=".", stop_in_reasoning=True).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "one" and not choice["message"]["content"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ".")


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_ends_while_it_thinks(server: Server, told: Told, stream: bool) -> None:
    """It has said all it had to say: `stop`, no content, and what it thought is reasoning."""
    told.says = "hm"
    if stream:
        chunks = [c for e in events_of(post(server, stream=True).text)[:-1] for c in e["choices"]]
        deltas = [chunk["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert not any(delta.get("content") for delta in deltas) and chunks[-1]["finish_reason"] == "stop"
        return
    answer = post(server).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["content"] is None and message["reasoning_content"] == "hm" and choice["finish_reason"] == "stop"
    details = answer["usage"]["completion_tokens_details"]
    assert (details["reasoning_tokens"], answer["usage"]["completion_tokens"]) == (2, 3), "the end is no reasoning"
    response = post(server, "/v1/responses", messages=None, input="hi").json()
    (item,) = response["output"]
    assert (item["type"], item["status"], response["status"]) == ("reasoning", "completed", "completed")
    said = post(server, MESSAGES, max_tokens=50).json()
    assert [block["type"] for block in said["content"]] == ["thinking"] and said["stop_reason"] == "end_turn"
