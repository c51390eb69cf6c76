"""OpenAI's own client against a real server: tools, streams, its helpers, both of its APIs, asynchronous too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

pytestmark = pytest.mark.slow

MODEL = "smollm2"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_a_tool_and_its_result(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    asked: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
    said: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    choice = create(messages=said, tool_choice="required", **asked).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and set(json.loads(call.function.arguments)) == {"city"}
    with client.chat.completions.stream(messages=said, tool_choice="required", **asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    named = create(messages=said, tool_choice={"type": "function", "function": {"name": "get_weather"}}, **asked)
    assert named.choices[0].finish_reason == "stop" and named.choices[0].message.tool_calls
    said += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = create(messages=said, tool_choice="none", **{**asked, "max_tokens": 4}).choices[0]
    assert last.message.content and not last.message.tool_calls


def test_streams_and_their_usage(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks[:-1])


def test_parsed_answers(client: openai.OpenAI) -> None:
    class City(pydantic.BaseModel):
        capital: bool
        rank: int = pydantic.Field(ge=0, le=9)

    parsed = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=City, max_tokens=80, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    answer = client.responses.parse(model=MODEL, input="Paris?", text_format=City, max_output_tokens=80, temperature=0)
    assert isinstance(answer.output_parsed, City)


def test_responses_with_a_tool(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_output_tokens": 100,
                  "parallel_tool_calls": False, "tool_choice": "required"}  # fmt: skip
    first = client.responses.create(input="Weather in Paris?", **asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    with client.responses.stream(input="Weather in Paris?", **asked) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert streamed.arguments == call.arguments and kinds[0] == "response.created" and kinds[-1] == "response.completed"
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    after = client.responses.create(model=MODEL, input=result, previous_response_id=first.id, max_output_tokens=4)
    assert after.output_text
    client.responses.delete(after.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(after.id)


def test_many_at_once(url: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, max_tokens=12, temperature=0, seed=number, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*map(one, range(6))))

    texts = asyncio.run(run())
    assert len(set(texts)) == 1 and "Paris" in texts[0]


def test_completions_embeddings_and_mistakes(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0)
    assert "Paris" in text.choices[0].text
    assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=10**6, stream=True)
    assert error.value.code == "context_length_exceeded"
