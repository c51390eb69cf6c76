"""Which parsers a server uses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headrace import plugins
from headrace.cli.options import REASONING_PARSERS, TOOL_PARSERS
from headrace.params import SamplingParams
from headrace.server.parsing import Parsing, choose_parsing, parser_name, parser_names
from headrace.server.tools import ToolUse
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import ByteTokenizer

THINK = "{{ '<think>' }} tools {{ '</think>' }}"


def choose(reasoning: str | None, tool: str | None, source: str = "tools", model_type: str = "") -> Parsing:
    template = ChatTemplate({"default": source}, special_tokens={})
    return choose_parsing(reasoning, tool, template=template, tokenizer=ByteTokenizer(), model_type=model_type)


def name_of(format: Any) -> str:
    found = [name for name in plugins.names("server.parsers") if plugins.load("server.parsers", name) is format]
    return found[0] if found else ""


def test_help_lists_what_there_is() -> None:
    assert parser_names("reasoning") == REASONING_PARSERS.split(", ")
    assert parser_names("tool") == TOOL_PARSERS.split(", ")


def test_the_document_names_every_format_and_source() -> None:
    text = Path(__file__).parents[2].joinpath("docs/parsers.md").read_text()
    for name in plugins.names("server.parsers"):
        assert f"### {name} (" in text
        assert all(source in text for source in plugins.load("server.parsers", name).source)


def test_names() -> None:
    assert parser_name("deepseek-r1", "reasoning") == "deepseek_r1"
    assert parser_name("GLM4", "tool") == "glm45"
    with pytest.raises(ValueError, match="tool_parser: 'deepseek_r1' is not known; known: auto, "):
        parser_name("deepseek_r1", "tool")


@pytest.mark.parametrize(
    ("source", "model_type", "reasoning", "tool"),
    [
        (f"{THINK} <tool_call> arguments", "qwen3", "qwen3", "hermes"),
        (f"{THINK} <tool_call> <function= <parameter=", "qwen3_5_moe", "qwen3_5", "qwen3_coder"),
        (f"{THINK} <tool_call> <function= <parameter=", "nemotron_h", "nemotron_v3", "qwen3_coder"),
        (f"{THINK} ]~b] <minimax:tool_call>", "minimax_m2", "minimax_m2", "minimax_m2"),
        ("<mm:think> ]<]minimax[>[ <tool_call> arguments", "", "minimax_m3", "minimax_m3"),
        ("tools <|channel|>analysis<|message|>", "gpt_oss", "openai", "openai"),
        ("tools <|open|><|close|><|sep|>", "", "kimi_k3", "kimi_k3"),
        (f"{THINK} <|tool_calls_section_begin|>", "kimi_k25", "kimi_k2", "kimi_k2"),
        ("<|channel>thought <|tool_call> <|\"|>", "gemma4", "gemma4", "gemma4"),
        ("</think> <｜Assistant｜> <｜tool▁calls▁begin｜> ```json", "deepseek_v3", "deepseek_r1", "deepseek_v3"),
        ("</think> <｜Assistant｜> <｜tool▁calls▁begin｜>", "deepseek_v3", "deepseek_r1", "deepseek_v31"),
        (f"{THINK} <arg_key> {{function-name}}<arg_key>", "glm4_moe", "glm45", "glm47"),
        (f"{THINK} <arg_key> <tool_call>", "glm4_moe", "glm45", "glm45"),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral3", "mistral", "mistral"),
        ('tools {"name": function name, "parameters": dict}', "llama", "", "llama3_json"),
        (THINK, "", "", ""),
        ("just a chat", "llama", "", ""),
        ("", "deepseek_v4", "deepseek_v4", "deepseek_v4"),
    ],
)  # fmt: skip
def test_auto(source: str, model_type: str, reasoning: str, tool: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace"):
        parsing = choose("auto", "auto", source, model_type)
    assert name_of(parsing.thinking) == reasoning
    assert name_of(parsing.calls) == tool


def test_a_format_that_is_read_as_a_whole() -> None:
    parsing = choose(None, "openai")
    assert name_of(parsing.thinking) == name_of(parsing.calls) == "openai"
    with pytest.raises(ValueError, match="reads reasoning and calls together"):
        choose("qwen3", "openai")


def test_off_by_default() -> None:
    parsing = choose(None, None)
    found = parsing.chat("prompt <think>", ToolUse(), SamplingParams(), variables={})
    assert found.new_text is None and found.guided is None


@pytest.mark.parametrize(
    ("name", "prompt", "variables", "is_open"),
    [
        ("qwen3", "<think> hi [assistant]", {}, False),
        ("qwen3", "[assistant]<think>\n", {}, True),
        ("qwen3_5", "[assistant]<think>\n\n</think>\n\n", {}, False),
        ("deepseek_r1", "[assistant]", {}, True),
        ("deepseek_r1", "[assistant]", {"thinking": False}, False),
        ("gemma4", "[model]<|channel>thought\n<channel|>", {}, False),
        ("openai", "<|end|><|start|>assistant", {}, False),
    ],
)
def test_where_the_output_begins(name: str, prompt: str, variables: dict[str, Any], is_open: bool) -> None:
    found = choose(name, None).chat(prompt, ToolUse(), SamplingParams(), variables=variables)
    assert found.new_text is not None
    text = found.new_text(SamplingParams(), frozenset())
    assert text.push([*b"hello"]).num_reasoning == (5 if is_open else 0)
