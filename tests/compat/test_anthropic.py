"""Anthropic's own client against a real server: tools, streams, its helpers, counts, mistakes."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

pytestmark = pytest.mark.slow

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}]
COLD: Any = {"model": "smollm2", "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def test_a_tool_and_its_result(client: anthropic.Anthropic) -> None:
    said: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    asked: Any = {**COLD, "max_tokens": 100, "tools": TOOLS}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(messages=said, tool_choice=choice, **asked)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and set(call.input) == {"city"}
    with client.messages.stream(messages=said, tool_choice=choice, **asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    assert {"input_json", "content_block_stop", "message_stop"} <= kinds
    assert streamed.content[-1].type == "tool_use" and streamed.content[-1].input == call.input
    assert streamed.stop_reason == "tool_use"
    named = client.messages.create(messages=said, tool_choice={"type": "tool", "name": "get_weather"}, **asked)
    assert named.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=said, tool_choice={"type": "none"}, **{**asked, "max_tokens": 4})
    assert [block.type for block in last.content] == ["text"] and last.stop_reason in ("end_turn", "max_tokens")


def test_streams_equal_whole_answers(client: anthropic.Anthropic) -> None:
    asked: Any = {**COLD, "max_tokens": 12, "messages": QUESTION, "system": "Be short."}
    whole = client.messages.create(**asked)
    assert whole.content[0].type == "text"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        streamed = stream.get_final_message()
    assert streamed.stop_reason == whole.stop_reason and streamed.usage.output_tokens == whole.usage.output_tokens
    stopped = client.messages.create(**{**asked, "max_tokens": 30}, stop_sequences=["France"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "France")
    counted = client.messages.count_tokens(model="smollm2", messages=QUESTION, system="Be short.").input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_many_at_once(url: str) -> None:
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:

            async def one() -> str:
                async with client.messages.stream(**COLD, max_tokens=12, messages=QUESTION) as stream:
                    return "".join([text async for text in stream.text_stream])

            return list(await asyncio.gather(*(one() for _ in range(6))))

    texts = asyncio.run(run())
    assert len(set(texts)) == 1 and "Paris" in texts[0]


def test_mistakes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
        client.messages.create(model="smollm2", max_tokens=1, messages=QUESTION, extra_body={"temperature": -1})
    body: Any = wrong.value.body
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", "temperature")
