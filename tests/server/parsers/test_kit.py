"""Every format against the kit of `tests/kits/parser.py`."""

from __future__ import annotations

import json
import re

import pytest

from headrace import plugins
from headrace.server.parsers.port import Format
from tests.kits.parser import Parsed, check_cuts, check_noise, check_prefixes, load, machine, parse, play

from .samples import SAMPLES, Sample

NAMES = plugins.names("server.parsers")
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.format)
each_format = pytest.mark.parametrize("name", NAMES)
STRUCTURE = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|\]<\]minimax\[>\[|[{}\[\]\":,=()]|\w+|\s+")


def test_every_format_has_a_sample() -> None:
    assert {sample.format for sample in SAMPLES} == set(NAMES)


@each_format
def test_what_a_file_offers(name: str) -> None:
    format = load(name)
    assert isinstance(format, Format)
    assert format.thinking or format.calls
    assert format.source and all(format.source)
    for part in (format.thinking, format.calls):
        assert part is None or all(token.strip() == token for token in part.tokens)


@each_sample
def test_the_sample(sample: Sample) -> None:
    assert parse(play(machine(sample.format, is_open=sample.is_open), [sample.text])) == sample.parsed


@each_sample
def test_cuts_change_nothing(sample: Sample) -> None:
    check_cuts(sample.format, sample.text, is_open=sample.is_open, num_cuts=1000)


@each_sample
def test_an_output_may_end_anywhere(sample: Sample) -> None:
    check_prefixes(sample.format, sample.text, is_open=sample.is_open)


@each_format
def test_noise(name: str) -> None:
    pieces = [piece for sample in SAMPLES if sample.format == name for piece in STRUCTURE.findall(sample.text)]
    check_noise(name, [*pieces, "\n", " ", "</think>", "<think>"], num_texts=250)


@each_format
def test_plain_text_is_content_to_the_last_character(name: str) -> None:
    for text in ("  Hello!\n\nA <b>bold</b> claim: 1 < 2 > 0, {x} [y] ]<] <|x|> ｜ \n\n", "", " ", "a", "<", "\n<tool"):
        for parser in (machine(name), machine(name, tools={})):
            assert parse(play(parser, text)) == Parsed("", text)


@each_format
def test_reasoning_that_is_cut_off_is_no_content(name: str) -> None:
    thinking = load(name).thinking
    if thinking is None:
        pytest.skip("no reasoning")
    assert parse(play(machine(name, is_open=True), "Let me think")) == Parsed("Let me think")
    assert parse(play(machine(name), thinking.begin + "\nLet me think")) == Parsed("Let me think")
    parser = machine(name, is_open=True)
    assert parser.is_reasoning
    parser.push("done" + thinking.end)
    assert not parser.is_reasoning


@each_sample
def test_a_call_in_a_code_fence_is_a_call(sample: Sample) -> None:
    format = load(sample.format)
    if format.calls is None or format.calls.at_start or format.whole or sample.is_open:
        pytest.skip("calls stand at the start of an answer or in a channel")
    at = min(sample.text.index(begin) for begin in format.calls.begins if begin in sample.text)
    parsed = parse(play(machine(sample.format), f"So:\n```\n{sample.text[at:]}\n```\nDone."))
    assert parsed.calls == sample.parsed.calls
    assert parsed.content.startswith("So:\n```") and parsed.content.endswith("```\nDone.")


@each_format
def test_time_is_linear(name: str) -> None:
    """Characters looked at, for openers that lead nowhere and for a long argument, in small pieces."""
    format = load(name)
    begins = [*(format.calls.begins if format.calls else ()), *([format.thinking.begin] if format.thinking else ())]
    sample = next(each for each in SAMPLES if each.format == name)
    long = sample.text.replace("Köln", "Köln" * 500) if "Köln" in sample.text else sample.text * 50
    for text in ("".join(begins) * 300, "{[" * 3000, "<" * 6000, " \n" * 3000, long):
        parser = machine(name, is_open=sample.is_open)
        play(parser, [text[at : at + 7] for at in range(0, len(text), 7)])
        assert parser.tape.num_scanned < 25 * len(text), text[:40]


@pytest.mark.parametrize("name", [name for name in NAMES if load(name).calls])
def test_a_megabyte_of_openers(name: str) -> None:
    calls = load(name).calls
    assert calls is not None
    text = (calls.begins[0] if calls.begins else calls.at_start) * 4000
    parsed = parse(play(machine(name), [text]))
    assert not parsed.calls


class TestDecisions:
    def test_a_function_nobody_offered_is_still_a_call(self) -> None:
        text = '<tool_call>{"name": "rm", "arguments": {"x": 1}}</tool_call>'
        assert [call.name for call in parse(play(machine("hermes"), text)).calls] == ["rm"]

    def test_where_calls_have_no_marker_only_tools_are_calls(self) -> None:
        for name, text in (("llama3_json", '{"name": "Bob", "parameters": {}}'), ("pythonic", "[rm(x=1)]")):
            assert parse(play(machine(name), text)) == Parsed("", text)

    def test_malformed_calls_are_content(self) -> None:
        for text in ("<tool_call>nothing</tool_call>", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"a": [}'):
            assert parse(play(machine("hermes"), text)) == Parsed("", text)

    def test_a_line_break_in_a_string_is_escaped(self) -> None:
        text = '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>'
        assert parse(play(machine("hermes"), text)).calls[0].arguments == {"city": "a\nb\tc"}

    def test_the_end_tag_in_a_string_belongs_to_it(self) -> None:
        text = '<tool_call>{"name": "get_weather", "arguments": {"city": "a </tool_call> b"}}</tool_call>'
        assert parse(play(machine("hermes"), text)).calls[0].arguments == {"city": "a </tool_call> b"}

    @pytest.mark.parametrize(
        ("written", "value"),
        [("2026-01-15", "2026-01-15"), ("3", 3), ("-1", -1), ("3.0", 3.0), ("three", "three"), ("NaN", "NaN")],
    )
    def test_types_follow_the_schema_and_nothing_is_dropped(self, written: str, value: object) -> None:
        text = f"<tool_call>get_weather<arg_key>days</arg_key><arg_value>{written}</arg_value></tool_call>"
        assert parse(play(machine("glm47"), text)).calls[0].arguments == {"days": value}

    def test_a_string_that_looks_like_a_number_stays_one(self) -> None:
        city, exact = "<parameter=city>\n12\n</parameter>", "<parameter=exact>\nTrue\n</parameter>"
        text = f"<function=get_weather>\n{city}\n{exact}</function>"
        assert parse(play(machine("qwen3_coder"), text)).calls[0].arguments == {"city": "12", "exact": True}

    def test_ids(self) -> None:
        kimi = next(sample for sample in SAMPLES if sample.format == "kimi_k2")
        events = play(machine("kimi_k2", is_open=True), kimi.text)
        assert [event.id for event in events if hasattr(event, "id")] == ["functions.get_weather:0", "functions.now:1"]
        events = play(machine("mistral"), "[TOOL_CALLS]now[ARGS]{}")
        assert re.fullmatch(r"[A-Za-z0-9]{9}", events[0].id)  # pyright: ignore[reportAttributeAccessIssue]

    def test_arguments_come_as_they_are_written(self) -> None:
        parser = machine("hermes")
        parser.push('<tool_call>{"name": "get_weather", "arguments": {"city": "')
        assert [json.dumps(event.text) for event in parser.push("Par")] == ['"Par"']  # pyright: ignore
        assert len(parser.push("is")) == 1

    def test_a_tag_in_prose_is_no_reasoning(self) -> None:
        text = "Use the <think> tag, then </think>."
        assert parse(play(machine("qwen3"), text)) == Parsed("", text)
