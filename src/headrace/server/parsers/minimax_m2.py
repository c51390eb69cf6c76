"""MiniMax M2: reasoning between `<think>` tags that the prompt has opened, calls as `<invoke name="f">` elements."""

from __future__ import annotations

from headrace.server.parsers._xml import Elements
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Thinking, Tool, Tree

__all__ = ["FORMAT"]

_ELEMENTS = Elements(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    invoke='<invoke name="',
    invoke_name_end='">',
    invoke_end="</invoke>",
    parameter='<parameter name="',
    parameter_name_ends=(('">', None),),
    parameter_end="</parameter>",
)


def _tag(tool: Tool) -> Tree:
    return _ELEMENTS.tree(tool, line="\n")


FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>"), is_open=True),
    calls=Calls(
        begins=("<minimax:tool_call>",),
        read=_ELEMENTS.read,
        tags=CallTags(
            tag=_tag,
            before="<minimax:tool_call>\n",
            separator="\n",
            after="\n</minimax:tool_call>",
            trigger="<minimax:tool_call>",
        ),
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
        ends_reasoning=True,
    ),
    reasoning_signs=Signs(template=("<think>", "</think>", "]~b]"), model_types=("minimax",)),
    tool_signs=Signs(template=("<minimax:tool_call>",)),
    source=(
        "MiniMaxAI/MiniMax-M2 docs/tool_calling_guide.md and chat template",
        "vLLM documentation, parser/minimax_m2",
    ),
)
