"""Kimi K2: special tokens around an id that names the function, and JSON."""

from __future__ import annotations

from headrace.server.parsers._named import NamedJson
from headrace.server.parsers._tags import arguments_of, tag
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Thinking, Tool, Tree

__all__ = ["FORMAT"]

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _SEP = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"


def _name_of(header: str) -> tuple[str, str]:
    """`functions.get_weather:0` is the call's id, too: the template writes it into later prompts."""
    name, colon, number = header.rpartition(":")
    if not colon or not number.isdecimal():
        return header.removeprefix("functions."), ""
    return name.removeprefix("functions."), header


def _new_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


_CALLS = NamedJson(section=_BEGIN, section_end=_END, call=_CALL, call_end=_CALL_END, separator=_SEP, name_of=_name_of)


def _tag(tool: Tool) -> Tree:
    header = {"type": "sequence", "elements": [
        {"type": "regex", "pattern": r"[0-9]{1,3}"}, {"type": "const_string", "value": _SEP}, arguments_of(tool)
    ]}  # fmt: skip
    return tag(f"{_CALL}functions.{tool.name}:", header, _CALL_END)


FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>"), is_open=True),
    calls=Calls(
        begins=(_BEGIN,),
        read=_CALLS.read,
        tags=CallTags(tag=_tag, before=_BEGIN, after=_END, trigger=_BEGIN),
        tokens=(_BEGIN, _END, _CALL, _CALL_END, _SEP),
        ends_reasoning=True,
        new_id=_new_id,
    ),
    reasoning_signs=Signs(template=("<think>", "</think>", _BEGIN), model_types=("kimi",)),
    tool_signs=Signs(template=(_BEGIN,)),
    source=(
        "moonshotai/Kimi-K2-Instruct docs/tool_call_guidance.md and chat template",
        "vLLM documentation, parser/kimi_k2",
    ),
)
