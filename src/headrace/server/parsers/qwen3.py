"""Qwen3: reasoning between `<think>` tags, calls as JSON objects between `<tool_call>` tags."""

from __future__ import annotations

from headrace.server.parsers._objects import TAGS, read_calls
from headrace.server.parsers.port import Calls, Format, Signs, Thinking

__all__ = ["FORMAT"]

FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>")),
    calls=Calls(begins=("<tool_call>",), read=read_calls, tags=TAGS),
    # What any template with these tags needs, where no other format is more exactly it.
    reasoning_signs=Signs(template=("<think>", "</think>"), model_types=("qwen3", "qwen2")),
    source=("Qwen/Qwen3-8B chat template and model card", "vLLM documentation, parser/qwen3"),
)
