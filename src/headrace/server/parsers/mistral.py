"""Mistral: `[TOOL_CALLS]` before a JSON list (tokenizers v3, v7), or before each name with `[ARGS]` (v11, v13)."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping

from headrace.server.parsers._json import CallObjects, JsonReader, read_arguments
from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import arguments_of, tag
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Thinking, Tool, Tree

__all__ = ["FORMAT"]

_CALL, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_LENGTH = 9
_WORD = re.compile(r"[^\s\[\]{}<]*")
_SEPARATORS = Markers((_ARGS, _ID))
_ARGS_ONLY = Markers((_ARGS,))
_JSON = JsonReader(Markers((_CALL,)), hard=True)
_LIST = CallObjects(_JSON)


def _new_id(name: str, index: int) -> str:
    """Its template takes ids of nine letters and digits only."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    lead = [begin, (yield from tape.white())]
    char = yield from tape.peek()
    if char and char in "[{":
        yield from _LIST.read(tape, out, "".join(lead), tools)
        return
    name = yield from _word(tape, lead)
    call_id = ""
    marker = yield from tape.one_of(_SEPARATORS)
    lead.append(marker)
    if marker == _ID:
        call_id = yield from _word(tape, lead)
        marker = yield from tape.one_of(_ARGS_ONLY)
        lead.append(marker)
    if not name or (not marker and (yield from tape.peek()) != "{"):
        out.no_call("".join(lead))
        return
    out.begin_call(name, call_id)
    if (yield from read_arguments(tape, out, _JSON)) or not tape.is_over:
        out.end_call()


def _word(tape: Tape, lead: list[str]) -> Reading[str]:
    parts: list[str] = []
    yield from tape.run(_WORD, parts.append)
    lead += parts
    return "".join(parts)


def _tag(tool: Tool) -> Tree:
    return tag(f"{_CALL}{tool.name}{_ARGS}", arguments_of(tool), "")


FORMAT = Format(
    thinking=Thinking(begin="[THINK]", end="[/THINK]", tokens=("[THINK]", "[/THINK]"), anywhere=True),
    calls=Calls(
        begins=(_CALL,),
        read=_read,
        tags=CallTags(tag=_tag, trigger=_CALL),
        tokens=(_CALL, _ARGS, _ID),
        ends_reasoning=True,
        new_id=_new_id,
    ),
    reasoning_signs=Signs(template=("[THINK]", "[/THINK]")),
    tool_signs=Signs(template=(_CALL,)),
    source=(
        "mistralai/mistral-common documentation, 'Tokenizers' (v3 to v13)",
        "vLLM documentation, tool_parsers/mistral_tool_parser",
    ),
)
