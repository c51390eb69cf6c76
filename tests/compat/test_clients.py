"""Clients of other projects against a real server: each is skipped where it isn't installed.

They want packages of their own and are tried in an environment beside the project's, with PYTHONPATH on both.
"""

from __future__ import annotations

import asyncio
from typing import Any

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


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    to: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    said: list[Any] = list(QUESTION)
    asked = litellm.completion(messages=said, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
                               max_tokens=100, **to).choices[0]  # fmt: skip
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls
    said += [asked.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert litellm.completion(messages=said, tools=TOOLS, tool_choice="none", max_tokens=4, **to).usage.prompt_tokens
    chunks = list(litellm.completion(messages=QUESTION, stream=True, max_tokens=12, **to))
    assert "Paris" in litellm.stream_chunk_builder(chunks).choices[0].message.content
    chunks = list(litellm.completion(messages=said[:1], tools=TOOLS, tool_choice="required", stream=True,
                                     parallel_tool_calls=False, max_tokens=100, **to))  # fmt: skip
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    anthropic = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none", "temperature": 0}
    assert "Paris" in litellm.completion(messages=QUESTION, max_tokens=12, **anthropic).choices[0].message.content
    chunks = list(litellm.completion(messages=QUESTION, stream=True, max_tokens=12, **anthropic))
    assert "Paris" in litellm.stream_chunk_builder(chunks).choices[0].message.content


def test_langchain(url: str) -> None:
    package = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = package.ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=60)
    asked = model.bind_tools(TOOLS, tool_choice="get_weather").invoke("Weather in Paris?")
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    assert model.bind(max_tokens=4).invoke([("user", "Weather in Paris?"), asked, result]).usage_metadata
    assert "Paris" in "".join(piece.content for piece in model.stream("What is the capital of France?"))
    pieces = list(model.bind_tools(TOOLS, tool_choice="get_weather").stream("Weather in Paris?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["args"] == call["args"]
    newer = package.ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=12,
                               use_responses_api=True)  # fmt: skip
    assert "Paris" in str(newer.invoke("What is the capital of France?").content)


def test_pydantic_ai(url: str) -> None:
    pydantic = pytest.importorskip("pydantic")
    package = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    City = pydantic.create_model("City", big=(bool, ...), size=(int, pydantic.Field(ge=0, le=99)))
    settings = {"max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    said = package.Agent(model, output_type=City, model_settings=settings).run_sync("Describe Paris.").output
    assert isinstance(said, City)
    plain = package.Agent(model, model_settings={"max_tokens": 12, "temperature": 0})
    assert "Paris" in plain.run_sync("What is the capital of France?").output

    async def streamed() -> str:
        async with plain.run_stream("What is the capital of France?") as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    assert "Paris" in asyncio.run(streamed())
    calls: list[str] = []
    agent = package.Agent(
        model, output_type=City, model_settings={**settings, "temperature": 0.9, "seed": 3}, retries=2
    )

    def get_weather() -> str:
        """The weather."""
        calls.append("weather")
        return "sunny"

    agent.tool_plain(get_weather)
    assert isinstance(agent.run_sync("What is the weather? Then describe Paris.").output, City)


def test_pydantic_ai_with_anthropic(url: str) -> None:
    package = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    models = pytest.importorskip("pydantic_ai.models.anthropic")
    providers = pytest.importorskip("pydantic_ai.providers.anthropic")
    model = models.AnthropicModel(MODEL, provider=providers.AnthropicProvider(base_url=url, api_key="none"))
    agent = package.Agent(model, model_settings={"max_tokens": 12, "temperature": 0})
    assert "Paris" in agent.run_sync("What is the capital of France?").output
