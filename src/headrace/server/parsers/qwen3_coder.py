"""Qwen3-Coder (also Qwen3.5 and Nemotron 3): `<function=f>` with one `<parameter=x>` element each."""

from __future__ import annotations

from headrace.server.parsers._xml import Elements
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Tool, Tree

__all__ = ["FORMAT"]

_ELEMENTS = Elements(
    section="<tool_call>",
    section_end="</tool_call>",
    invoke="<function=",
    invoke_name_end=">",
    invoke_end="</function>",
    parameter="<parameter=",
    parameter_name_ends=((">", None),),
    parameter_end="</parameter>",
)


def _tag(tool: Tool) -> Tree:
    return _ELEMENTS.tree(tool, begin="<tool_call>\n", end="\n</tool_call>")


FORMAT = Format(
    calls=Calls(
        begins=("<tool_call>", "<function="),
        read=_ELEMENTS.read,
        tags=CallTags(tag=_tag, separator="\n", trigger="<tool_call>"),
    ),
    tool_signs=Signs(template=("<tool_call>", "<function=", "<parameter=")),
    source=("Qwen/Qwen3-Coder-30B-A3B-Instruct chat template", "vLLM documentation, parser/qwen3"),
)
