"""Tools and reasoning over HTTP, through the official client, on a model that says what it is told to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.front.fake import FakeLoop, fake_info, says
from headrace.front.text_side import TextSide
from headrace.hub.source import ModelSource
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import ByteTokenizer
from headrace.types import Request

from .harness import MODEL, Server, running

END = 257
TEMPLATE = (
    "{% for tool in tools or [] %}[tool] {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


class Told:
    """What the model says next, and what it was asked."""

    def __init__(self) -> None:
        self.says = ""
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> Iterator[int]:
        self.requests.append(request)
        return says([*self.says.encode()], then=END)(request)

    @property
    def prompt(self) -> str:
        return bytes(token for token in self.requests[-1].prompt if token < 256).decode()


@contextmanager
def serving(folder: Path, told: Told, **options: Any) -> Iterator[Server]:
    (folder / "config.json").write_text(json.dumps({"model_type": "fake", "eos_token_id": END}))
    tokenizer = ByteTokenizer()
    template = ChatTemplate({"default": TEMPLATE}, special_tokens=tokenizer.special_tokens, name=MODEL)
    text = TextSide(source=ModelSource(kind="hf", path=folder, name=MODEL), tokenizer=tokenizer, template=template)
    with running(folder, loop=FakeLoop(fake_info(), script=told), load_text=lambda: text, **options) as server:
        yield server


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, told: Told) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tools")
    with serving(folder, told, reasoning_parser="qwen3", tool_parser="hermes") as running_server:
        yield running_server


def ask(server: Server, **fields: Any) -> tuple[Any, str, Any]:
    """(message, finish reason, usage) of a whole answer."""
    answer = server.client.chat.completions.create(model=MODEL, **{"messages": HI, "tools": TOOLS, **fields})
    (choice,) = answer.choices
    return choice.message, choice.finish_reason, answer.usage


def ask_streamed(server: Server, **fields: Any) -> tuple[dict[str, Any], str, Any]:
    """The same, put together from a stream whose form is checked."""
    stream = server.client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True},
        **{"messages": HI, "tools": TOOLS, **fields},
    )  # fmt: skip
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(message["tool_calls"]):
                    assert call.id and call.type == "function" and call.function and call.function.name
                    message["tool_calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(message["tool_calls"]) - 1
                    assert call.id is None and call.function and call.function.name is None
                message["tool_calls"][-1][2] += call.function.arguments or ""
            finish = choice.finish_reason or finish
    return message, finish, usage


def test_calls_whole_and_streamed(server: Server, told: Told) -> None:
    told.says = "<think>\nWhich city?\n</think>\n\nI look.\n" + CALLS
    message, finish, usage = ask(server)
    assert (message.content, finish) == ("I look.", "tool_calls")
    assert message.reasoning_content == message.reasoning == "Which city?"
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("function", "get_weather", {"city": "Köln"}),
        ("function", "now", {}),
    ]
    assert len({c.id for c in message.tool_calls}) == 2
    streamed, finish, streamed_usage = ask_streamed(server)
    assert (streamed["content"], streamed["reasoning"], finish) == ("I look.", "Which city?", "tool_calls")
    assert [call[1:] for call in streamed["tool_calls"]] == [
        [c.function.name, c.function.arguments] for c in message.tool_calls
    ]
    for each in (usage, streamed_usage):
        reasoning = each.completion_tokens_details.reasoning_tokens
        assert 0 < reasoning <= len("<think>\nWhich city?\n</think>") < each.completion_tokens
    assert usage == streamed_usage
    assert "[tool] get_weather\n[tool] now\n" in told.prompt


def test_an_answer_without_calls(server: Server, told: Told) -> None:
    told.says = " Just  text.\n"
    message, finish, usage = ask(server)
    assert (message.content, message.tool_calls, finish) == (" Just  text.\n", None, "stop")
    assert ask_streamed(server)[:2] == ({"content": " Just  text.\n", "reasoning": "", "tool_calls": []}, "stop")
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_only_calls_have_no_content(server: Server, told: Told) -> None:
    told.says = CALLS
    assert ask(server)[0].content is None


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
)
def test_finish_reasons(server: Server, told: Told, choice: Any, finish: str) -> None:
    told.says = CALLS.split("\n<tool_call>")[0]
    for function in (ask, ask_streamed):
        assert function(server, tool_choice=choice)[1] == finish
    grammar = told.requests[-1].grammar
    assert (grammar is None) == (choice == "auto")
    if grammar is not None:
        assert grammar.kind == "structural_tag" and "get_weather" in grammar.spec
        assert ('"now' in grammar.spec.replace("\\", "")) == (choice == "required")


def test_no_tools_means_no_calls(server: Server, told: Told) -> None:
    told.says = CALLS
    for fields in ({"tool_choice": "none"}, {"tools": None}):
        message, finish, _ = ask(server, **fields)
        assert (message.content, message.tool_calls, finish) == (CALLS, None, "stop")
        assert "[tool]" not in told.prompt


def test_one_call_at_a_time(server: Server, told: Told) -> None:
    told.says = CALLS
    for function in (ask, ask_streamed):
        message, finish, _ = function(server, parallel_tool_calls=False)
        calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
        assert (len(calls), finish) == (1, "tool_calls")


def test_the_prompt_may_have_opened_the_reasoning(server: Server, told: Told) -> None:
    told.says = "Which city?\n</think>\nKöln."
    for fields in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
                   {"extra_body": {"thinking": {"type": "enabled"}}}):  # fmt: skip
        message, _, _ = ask(server, **fields)
        assert (message.reasoning_content, message.content) == ("Which city?", "Köln.")
        assert told.prompt.endswith("<think>\n")
    message, _, _ = ask(server, reasoning_effort="none")
    assert message.content == told.says and not hasattr(message, "reasoning_content")


def test_a_grammar_waits_for_the_reasoning(server: Server, told: Told) -> None:
    told.says = "Which city?</think>{}"
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    ask(server, response_format={"type": "json_object"}, tools=None, extra_body=body)
    grammar = told.requests[-1].grammar
    assert grammar is not None and grammar.starts_after == tuple((byte,) for byte in b"</think>")
    ask(server, response_format={"type": "json_object"}, tools=None)  # it may reason, or not
    grammar = told.requests[-1].grammar
    assert grammar is not None and grammar.starts_after == () and "<think>" in grammar.spec


def test_truncated_reasoning_is_no_content(server: Server, told: Told) -> None:
    told.says = "<think>I wonder about everything"
    message, finish, usage = ask(server, max_tokens=12)
    assert (message.content, message.reasoning_content, finish) == (None, "I won", "length")
    assert usage.completion_tokens_details.reasoning_tokens == 6  # from the end of the tag on
    streamed, finish, _ = ask_streamed(server, max_tokens=12)
    assert (streamed["content"], streamed["reasoning"], finish) == ("", "I won", "length")


def test_stop_strings_spare_the_reasoning(server: Server, told: Told) -> None:
    told.says = "<think>a STOP b</think>c STOP d"
    for function in (ask, ask_streamed):
        message, finish, _ = function(server, stop=["STOP"])
        content = message["content"] if isinstance(message, dict) else message.content
        assert (content, finish) == ("c ", "stop")


def test_ids_come_back(server: Server, told: Told) -> None:
    told.says = CALLS
    message, _, _ = ask(server)
    call = message.tool_calls[0]
    told.says = "It rains."
    history = [*HI, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer, finish, _ = ask(server, messages=history)
    assert (answer.content, finish) == ("It rains.", "stop")
    assert f'<tool_call>{call.id} get_weather {{"city": "Köln"}}' in told.prompt
    assert "[tool get_weather] rain" in told.prompt
    ask(server, messages=[*HI, {"role": "assistant", "content": "x", "reasoning_content": "y"}, *HI])
    assert "<think>y</think>" in told.prompt


def test_several_choices_and_log_probabilities(server: Server, told: Told) -> None:
    told.says = CALLS
    answer = server.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, n=2, logprobs=True)
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert len(choice.message.tool_calls or []) == 2


def refusal(call: Callable[[], Any]) -> Any:
    with pytest.raises(openai.BadRequestError) as caught:
        call()
    return caught.value.body


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "twice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools", "parameters"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "response_format"),
        ({"reasoning_effort": "maximum"}, "reasoning_effort", "maximum"),
        ({"extra_body": {"thinking_token_budget": -1}}, "thinking_token_budget", "thinking_token_budget"),
        ({"extra_body": {"thinking_token_budget": 5}, "max_tokens": 13}, "thinking_token_budget", "of 13 tokens"),
    ],
)
def test_refusals(server: Server, fields: dict[str, Any], param: str, text: str) -> None:
    for function in (ask, ask_streamed):
        error = refusal(lambda: function(server, **fields))  # noqa: B023
        assert error["param"] == param and text in error["message"]


def test_without_a_parser(tmp_path: Path, told: Told) -> None:
    told.says = CALLS
    with serving(tmp_path, told) as server:
        message, finish, _ = ask(server)
        assert (message.content, finish) == (CALLS, "stop")
        error = refusal(lambda: ask(server, tool_choice="required"))
        assert error["param"] == "tool_choice" and "--tool_parser" in error["message"]
