"""Ids to events: special tokens, stop strings, the count of reasoning tokens."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.params import SamplingParams
from headrace.server.parsed_text import ParsedText
from headrace.server.parsers.port import Content
from headrace.text.tokenizer import ByteTokenizer
from tests.kits.parser import Call, Parsed, machine, parse

END = 257


class Marked(ByteTokenizer):
    """Ids from 258 on are special tokens."""

    words = ("<think>", "</think>", "<|tool_call>", "<tool_call|>", '<|"|>', "<other>")
    special_ids = frozenset({256, 257, *range(258, 264)})
    vocab_size = 264

    def token(self, token_id: int) -> str | None:
        return self.words[token_id - 258] if token_id >= 258 else super().token(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self.words[token_id - 258].encode() if token_id >= 258 else super().token_bytes(token_id)


TOKENIZER = Marked()


def ids(*parts: str | int) -> list[int]:
    return [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]


def run(name: str, tokens: list[int], *, finish: Any = "stop", chunk: int = 1, shown: frozenset[int] = frozenset(),
        one_call: bool = False, is_open: bool = False, **params: Any) -> tuple[Parsed, list[Any]]:  # fmt: skip
    text = ParsedText(
        TOKENIZER, machine(name, is_open=is_open), SamplingParams(**params), eos_ids=frozenset({END}),
        shown_ids=shown, one_call=one_call,
    )  # fmt: skip
    deltas = [text.push(tokens[at : at + chunk]) for at in range(0, len(tokens), chunk)]
    if not deltas or not deltas[-1].finished:
        deltas.append(text.push([END], finish=finish, stop_token=END))
    events = [event for delta in deltas for event in delta.events]
    assert "".join(d.text for d in deltas) == "".join(e.text for e in events if isinstance(e, Content))
    return parse(events), deltas


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_parser_sees_its_tokens_and_the_client_none(chunk: int) -> None:
    tokens = ids(258, "hm", 259, "a", 263, "b", 260, "call:get_weather{city:", 262, "x", 262, "}", 261)
    shown = frozenset({258, 259, 260, 261, 262})
    parsed, _ = run("gemma4", tokens[4:], shown=shown, chunk=chunk)
    assert parsed == Parsed("", "ab", [Call("get_weather", {"city": "x"})])
    parsed, deltas = run("qwen3", tokens[:7], shown=shown, chunk=chunk)
    assert parsed == Parsed("hm", "ab")
    assert sum(delta.num_reasoning for delta in deltas) == 4  # the two tags are part of it


def test_without_them_shown_there_is_nothing_to_see() -> None:
    assert run("qwen3", ids(258, "hm", 259, "a"))[0] == Parsed("", "hma")


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_stop_strings_are_for_the_answer_only(chunk: int) -> None:
    text = "<think>one END two</think>three ENDING <tool_call>"
    parsed, deltas = run("qwen3", ids(text), stop="END", chunk=chunk)
    assert parsed == Parsed("one END two", "three ")
    last = deltas[-1]
    assert (last.finished, last.finish_reason, last.stop_reason) == (True, "stop", "END")
    kept = sum(delta.num_tokens_kept for delta in deltas)
    assert kept == len("<think>one END two</think>three END")


def test_a_stop_string_does_not_reach_over_a_call() -> None:
    text = 'EN<tool_call>{"name": "now", "arguments": {"D": "END"}}</tool_call>D'
    parsed, deltas = run("hermes", ids(text), stop="END")
    assert parsed == Parsed("", "END", [Call("now", {"D": "END"})])
    assert deltas[-1].stop_reason is None


def test_reasoning_that_is_cut_off(chunk: int = 5) -> None:
    parsed, deltas = run("qwen3_5", ids("I wonder"), finish="length", is_open=True, chunk=chunk)
    assert parsed == Parsed("I wonder") and deltas[-1].finish_reason == "length"
    assert sum(delta.num_reasoning for delta in deltas) == len("I wonder")


@pytest.mark.parametrize("chunk", [1, 1000])
def test_one_call_ends_the_sequence(chunk: int) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parsed, deltas = run("hermes", ids(call + call), one_call=True, chunk=chunk)
    assert [each.name for each in parsed.calls] == ["now"]
    assert deltas[-1].finished and deltas[-1].finish_reason == "stop"
    assert sum(delta.num_tokens_kept for delta in deltas) == call.index("</tool_call>")


def test_characters_of_several_tokens() -> None:
    parsed, _ = run("qwen3", ids("<think>ä🌉</think>Köln"))
    assert parsed == Parsed("ä🌉", "Köln")
