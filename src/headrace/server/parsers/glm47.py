"""GLM-4.7 and 5: as GLM-4.5, without line breaks between the parts."""

from __future__ import annotations

from headrace.server.parsers._glm import glm_calls
from headrace.server.parsers.port import Format, Signs, Thinking

__all__ = ["FORMAT"]

FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>")),
    calls=glm_calls(""),
    tool_signs=Signs(template=("{function-name}<arg_key>",)),
    source=("zai-org/GLM-4.7 chat template", "vLLM documentation, parser/glm47_moe"),
)
