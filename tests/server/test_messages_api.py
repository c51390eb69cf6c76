"""/v1/messages with the official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from headrace.front.fake import FakeLoop, fake_info, says

from .harness import TOOL_TEMPLATE, Server, running, text_side

PROMPT = "[user] hello\n[assistant] "
HELLO: Any = [{"role": "user", "content": "hello"}]


def client(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=20)


def create(server: Server, messages: Any = HELLO, **fields: Any) -> Any:
    return client(server).messages.create(**{"model": "fake:1", "max_tokens": 12, "messages": messages, **fields})


def block_events(events: Sequence[Any]) -> list[str]:
    return [event.type for event in events if event.type != "content_block_delta"]


def test_a_message_is_answered(server: Server) -> None:
    answer = create(server)
    assert answer.content[0].type == "text" and answer.content[0].text == PROMPT[:12]
    assert answer.stop_reason == "max_tokens" and answer.stop_sequence is None
    assert answer.id.startswith("msg_") and answer.role == "assistant" and answer.model == "fake:1"
    assert answer.usage.input_tokens == len(PROMPT) and answer.usage.output_tokens == 12
    assert answer.usage.cache_read_input_tokens == 0 and answer._request_id == answer.id


def test_system_and_blocks_are_messages_of_the_template(server: Server) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    system: Any = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    answer = create(server, messages, system=system, max_tokens=100)
    expected = "[system] be kind\n[user] a\nb\n[assistant] c\n[user] d\n[assistant] "
    assert answer.content[0].text.startswith(expected) and answer.usage.input_tokens == len(expected)


def test_the_stream(server: Server) -> None:
    events = list(create(server, max_tokens=4, stream=True))
    assert block_events(events) == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    start, last = events[0], events[-2]
    assert start.message.usage.input_tokens == len(PROMPT) and start.message.content == []
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == PROMPT[:4]
    assert last.delta.stop_reason == "max_tokens" and last.usage.output_tokens == 4


def test_pings_and_names_on_the_wire(server: Server) -> None:
    body = {"model": "fake:1", "max_tokens": 2, "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body) as answer:
        text = answer.read().decode()
        assert answer.headers["request-id"].startswith("msg_")
    names = [block.split("\n")[0] for block in text.split("\n\n") if block]
    assert names[:2] == ["event: message_start", "event: ping"] and names[-1] == "event: message_stop"
    assert "[DONE]" not in text


def test_the_clients_own_accumulation_agrees(server: Server) -> None:
    with client(server).messages.stream(model="fake:1", max_tokens=9, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == PROMPT[:9]
        final = stream.get_final_message()
    assert final.usage.output_tokens == 9 and final.stop_reason == "max_tokens"


def test_why_it_stopped(folder: Path) -> None:
    with running(folder, loop=FakeLoop(fake_info(), script=says(b"yes, no", then=257))) as server:
        whole = create(server)
        assert whole.stop_reason == "end_turn" and whole.content[0].text == "yes, no"
        cut = create(server, stop_sequences=[", "])
        assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", ", ", "yes")
        *_, delta, _ = list(create(server, stop_sequences=[", "], stream=True))
        assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", ", ")


def test_count_tokens(server: Server) -> None:
    counted = client(server).messages.count_tokens(model="fake:1", messages=HELLO, system="be kind")
    assert counted.input_tokens == len("[system] be kind\n" + PROMPT)
    with pytest.raises(anthropic.NotFoundError):
        client(server).messages.count_tokens(model="other", messages=HELLO)


def test_the_key_may_come_as_x_api_key(folder: Path) -> None:
    with running(folder, api_keys=("secret",)) as server:
        answer = client(server, "secret").messages.create(model="fake:1", max_tokens=2, messages=HELLO)
        assert answer.usage.output_tokens == 2
        with pytest.raises(anthropic.AuthenticationError) as error:
            client(server, "wrong").messages.create(model="fake:1", max_tokens=2, messages=HELLO)
        body: Any = error.value.body
        assert body["type"] == "error" and body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens must be at least 1"),
        ({"max_tokens": 5000}, "invalid_request_error", "messages: This model's context length is 4096"),
        ({"temperature": -1}, "invalid_request_error", "temperature"),
        ({"messages": []}, "invalid_request_error", "messages is empty"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "invalid_request_error", "messages[0].role must be"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "invalid_request_error", "the last message"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "invalid_request_error",
         "messages[0].content[0]: blocks of type 'video'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "invalid_request_error", "tools[0]: a tool of type"),
        ({"tool_choice": {"type": "some"}}, "invalid_request_error", "tool_choice.type must be"),
        ({"thinking": {"type": "enabled"}}, "invalid_request_error", "thinking.budget_tokens is required"),
        ({"stop_sequences": [""]}, "invalid_request_error", "stop_sequences"),
        ({"model": "other"}, "not_found_error", "does not exist"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_told_before_the_first_byte(
    server: Server, fields: dict[str, Any], kind: str, message: str, stream: bool
) -> None:
    body = {"model": "fake:1", "max_tokens": 12, "messages": HELLO, **fields, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/messages", json=body)
    assert answer.status_code == (404 if kind == "not_found_error" else 400)
    told = answer.json()
    assert told["type"] == "error" and told["error"]["type"] == kind and message in told["error"]["message"]
    assert answer.headers["request-id"].startswith("req_")


def test_a_full_queue_is_a_rate_limit(folder: Path) -> None:
    with running(folder, max_queued_requests=0) as server:
        with pytest.raises(anthropic.RateLimitError) as error:
            create(server)
        body: Any = error.value.body
        assert body["error"]["type"] == "rate_limit_error" and error.value.response.headers["retry-after"] == "1"


def test_a_fault_in_the_middle_is_an_error_event(folder: Path) -> None:
    loop = FakeLoop(fake_info())
    with running(folder, loop=loop, step_s=0.01) as server:
        seen: list[Any] = []
        with pytest.raises(anthropic.APIStatusError, match="the row has failed"):
            for event in create(server, max_tokens=1000, stream=True):
                seen.append(event)
                if len(seen) == 5:
                    loop.fault = "the row has failed"
        assert seen[-1].type == "content_block_delta"


def test_unknown_fields_are_told(server: Server) -> None:
    body = {"model": "fake:1", "max_tokens": 2, "messages": HELLO, "colour": "red", "logprobs": True, "top_k": 3,
            "metadata": {"user_id": "u"}}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/messages", json=body)
    assert answer.headers["x-headrace-warnings"] == "unknown fields: colour, logprobs"
    assert json.loads(answer.content)["usage"]["output_tokens"] == 2


# ---- thinking and tools ----------------------------------------------------------------------

THOUGHT, SAID, CALL = "is it warm?", "Let me look.", {"name": "weather", "arguments": {"city": "Rome"}}
OUTPUT = f"<think>{THOUGHT}</think>{SAID}<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that thinks, says something and uses a tool."""
    loop = FakeLoop(fake_info(), script=says(OUTPUT.encode(), then=257))
    folder = tmp_path_factory.mktemp("caller")
    with running(
        folder,
        loop=loop,
        load_text=lambda: text_side(folder, template=TOOL_TEMPLATE),
        reasoning_parser="qwen3",
        tool_parser="hermes",
    ) as found:
        yield found


def test_thinking_text_and_tools_are_blocks(caller: Server) -> None:
    answer = create(caller, tools=[TOOL], max_tokens=500)
    thinking, text, tool = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", THOUGHT)
    assert (text.type, text.text) == ("text", SAID)
    assert (tool.type, tool.name, tool.input) == ("tool_use", "weather", {"city": "Rome"})
    assert answer.stop_reason == "tool_use"
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens


def test_the_stream_of_blocks(caller: Server) -> None:
    with client(caller).messages.stream(model="fake:1", max_tokens=500, messages=HELLO, tools=[TOOL]) as stream:
        events = [event for event in stream if event.type.startswith(("content_block", "message"))]
        final = stream.get_final_message()
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [key for key, _ in itertools.groupby(event.type for event in events)]
    assert kinds == ["message_start", *blocks * 3, "message_delta", "message_stop"]
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].to_dict()["input"] == {"city": "Rome"} and final.stop_reason == "tool_use"


def test_results_of_tools_go_back(caller: Server) -> None:
    first = create(caller, tools=[TOOL], max_tokens=500)
    call_id = first.content[2].id
    result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "thanks"}]},
    ]
    counted = client(caller).messages.count_tokens(model="fake:1", messages=messages, tools=[TOOL])
    expected = (
        f"[user] hello\n[assistant] ({THOUGHT}) {SAID} weather#{call_id}\n"
        f"[tool {call_id}] sunny\n[user] thanks\n[assistant] "
    )
    assert counted.input_tokens == len(expected)
    assert create(caller, messages, tools=[TOOL], max_tokens=5).usage.input_tokens == len(expected)


def test_a_tool_use_that_is_cut_off(caller: Server) -> None:
    answer = create(caller, tools=[TOOL], max_tokens=len(OUTPUT) - 20)
    assert answer.stop_reason == "max_tokens"
