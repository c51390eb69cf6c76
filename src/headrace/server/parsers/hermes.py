"""Hermes 2 Pro and its many descendants (Qwen2.5, Hermes 3): a JSON object between `<tool_call>` tags."""

from __future__ import annotations

from headrace.server.parsers._objects import TAGS, read_calls
from headrace.server.parsers.port import Calls, Format, Signs

__all__ = ["FORMAT"]

FORMAT = Format(
    calls=Calls(begins=("<tool_call>",), read=read_calls, tags=TAGS),
    tool_signs=Signs(template=("<tool_call>", "arguments"), absent=("<function=", "<arg_key>", "]<]minimax[>[")),
    source=(
        "NousResearch/Hermes-2-Pro-Llama-3-8B model card, 'Prompt Format for Function Calling'",
        "Qwen/Qwen2.5-7B-Instruct chat template",
    ),
)
