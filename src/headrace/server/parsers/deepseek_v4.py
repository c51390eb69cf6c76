"""DeepSeek V4: reasoning between `<think>` tags, calls as elements of its markup language DSML."""

from __future__ import annotations

from headrace.server.parsers._dsml import dsml_calls
from headrace.server.parsers.port import Format, Signs, Thinking

__all__ = ["FORMAT"]

FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>")),
    calls=dsml_calls("tool_calls"),
    reasoning_signs=Signs(model_types=("deepseek_v4",)),
    tool_signs=Signs(model_types=("deepseek_v4",)),
    source=(
        "deepseek-ai/DeepSeek-V4-Pro encoding/README.md",
        "vLLM documentation, parser/deepseek_v4",
    ),
)
