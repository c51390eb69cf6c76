"""DSML, the markup of DeepSeek's calls: parameters say themselves whether they are text or JSON."""

from __future__ import annotations

from headrace.server.parsers._xml import Elements
from headrace.server.parsers.port import Calls, CallTags

__all__ = ["dsml_calls"]

_MARK = "｜DSML｜"


def dsml_calls(section: str) -> Calls:
    """Calls inside an element of that name."""
    elements = Elements(
        section=f"<{_MARK}{section}>",
        section_end=f"</{_MARK}{section}>",
        invoke=f'<{_MARK}invoke name="',
        invoke_name_end='">',
        invoke_end=f"</{_MARK}invoke>",
        parameter=f'<{_MARK}parameter name="',
        parameter_name_ends=(('" string="true">', True), ('" string="false">', False), ('">', None)),
        parameter_end=f"</{_MARK}parameter>",
        trims=False,
        mark=_MARK,
    )
    return Calls(
        begins=(elements.section,),
        read=elements.read,
        tags=CallTags(
            tag=elements.tree,
            before=f"{elements.section}\n",
            separator="\n",
            after=f"\n{elements.section_end}",
            trigger=elements.section,
        ),
        tokens=(_MARK,),
        ends_reasoning=True,
    )
