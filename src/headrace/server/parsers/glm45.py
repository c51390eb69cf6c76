"""GLM-4.5 and 4.6: reasoning between `<think>` tags, calls as a name with keys and values, one a line."""

from __future__ import annotations

from headrace.server.parsers._glm import glm_calls
from headrace.server.parsers.port import Format, Signs, Thinking

__all__ = ["FORMAT"]

FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>")),
    calls=glm_calls("\n"),
    reasoning_signs=Signs(template=("<think>", "</think>", "<arg_key>"), model_types=("glm",)),
    tool_signs=Signs(template=("<arg_key>",), absent=("{function-name}<arg_key>",)),
    source=("zai-org/GLM-4.5 chat template", "vLLM documentation, tool_parsers/glm4_moe_tool_parser"),
)
