"""DeepSeek V3 and R1: special tokens around a name and fenced JSON."""

from __future__ import annotations

from headrace.server.parsers._named import NamedJson
from headrace.server.parsers._tags import arguments_of, tag
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Tool, Tree

__all__ = ["FORMAT"]

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_CALLS = NamedJson(
    section=_BEGIN,
    section_end=_END,
    call=_CALL,
    call_end=_CALL_END,
    prefix=f"function{_SEP}",
    separator="\n```json\n",
    closer="```",
)


def _tag(tool: Tool) -> Tree:
    return tag(f"{_CALL}function{_SEP}{tool.name}\n```json\n", arguments_of(tool), f"\n```{_CALL_END}")


FORMAT = Format(
    calls=Calls(
        begins=(_BEGIN,),
        read=_CALLS.read,
        tags=CallTags(tag=_tag, before=_BEGIN, separator="\n", after=_END, trigger=_BEGIN),
        tokens=(_BEGIN, _END, _CALL, _CALL_END, _SEP),
        ends_reasoning=True,
    ),
    tool_signs=Signs(template=(_BEGIN, "```json")),
    source=("deepseek-ai/DeepSeek-V3-0324 chat template", "vLLM documentation, tool_parsers/deepseekv3_tool_parser"),
)
