"""gpt-oss: the harmony format, messages on the channels analysis, commentary and final.

Its library needs a vocabulary file from the network, and wants ids; this reads the text of the special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.server.parsers._json import JsonReader, read_arguments
from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import arguments_of, tag
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Thinking, Tool, Tree

__all__ = ["FORMAT"]

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ALL = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
_MARKERS = Markers(_ALL)
_HEADER_FIRST = Markers((*_ALL, " to=", "assistant"))
_RECIPIENT = re.compile(r"\bto=(\S+)")
_WORDS = frozenset({"assistant", "analysis", "commentary", "final", "json", "code"})
"""Of a header; what else stands there is content."""
_FUNCTIONS = "functions."
_JSON = JsonReader(_MARKERS, hard=True)


def _is_known(word: str) -> bool:
    return word in _WORDS or _RECIPIENT.fullmatch(word) is not None


class _Reader:
    """One message after the other: a header, then a body up to the marker that ends it."""

    def __init__(self, tape: Tape, out: Output, tools: Mapping[str, Tool] | None) -> None:
        self._tape = tape
        self._out = out
        self._tools = tools

    def run(self, *, is_open: bool) -> Reading[None]:
        tape, out = self._tape, self._out
        marker = ""
        if is_open:
            marker = yield from self._body("analysis", "")
        elif (yield from tape.stands(_HEADER_FIRST)):
            marker = _START  # the prompt has written it
        while not tape.is_over:
            if marker in (_START, _CHANNEL):
                marker = yield from self._message(marker)
            elif marker == _MESSAGE:
                marker = yield from self._body("final", "")
            else:
                marker = yield from tape.until(_MARKERS, out.content)

    def _message(self, marker: str) -> Reading[str]:
        """A message whose header begins with `marker`; the marker behind it. A header without a body is content."""
        header: list[str] = []
        channel = ""
        is_channel = marker == _CHANNEL
        while True:
            parts: list[str] = []
            marker = yield from self._tape.until(_MARKERS, parts.append)
            text = "".join(parts)
            header.append(text)
            if is_channel:
                channel = text.split(maxsplit=1)[0] if text.strip() else ""
            is_channel = marker == _CHANNEL
            if marker not in (_CHANNEL, _CONSTRAIN, _START):
                break
        if marker == _MESSAGE:
            words = " ".join(header).split()
            self._out.content(" ".join(word for word in words if not _is_known(word)))
            found = _RECIPIENT.search(" ".join(header))
            return (yield from self._body(channel, found[1] if found else ""))
        self._out.content("".join(header).removeprefix("assistant"))
        return marker

    def _body(self, channel: str, recipient: str) -> Reading[str]:
        """The marker behind it."""
        tape, out = self._tape, self._out
        name = recipient.removeprefix(_FUNCTIONS)
        out.end_part()
        if self._tools is not None and name and (recipient != name or name in self._tools):
            out.begin_call(name)
            if (yield from read_arguments(tape, out, _JSON)) or not tape.is_over:
                out.end_call()
            return (yield from tape.until(_MARKERS, out.content))
        out.in_reasoning = channel == "analysis" and not recipient
        marker = yield from tape.until(_MARKERS, out.reasoning if out.in_reasoning else out.content)
        if marker:
            out.in_reasoning = False
            out.end_part()
        return marker


def _whole(tape: Tape, out: Output, tools: Mapping[str, Tool] | None, is_open: bool) -> Reading[None]:
    return _Reader(tape, out, tools).run(is_open=is_open)


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    return _Reader(tape, out, tools).run(is_open=False)


def _tag(tool: Tool) -> Tree:
    header = f"{_CHANNEL}commentary to={_FUNCTIONS}{tool.name} {_CONSTRAIN}json{_MESSAGE}"
    return tag(header, arguments_of(tool), "")


FORMAT = Format(
    thinking=Thinking(
        begin=f"{_CHANNEL}analysis{_MESSAGE}",
        end=_END,
        tokens=_ALL,
        between=f"{_START}assistant",
        also_ends=tuple(mark for mark in _ALL if mark != _END),
        anywhere=True,
    ),
    calls=Calls(
        begins=(_CHANNEL,),
        read=_read,
        tags=CallTags(tag=_tag, separator=f"{_CALL}{_START}assistant", trigger=f"{_CHANNEL}commentary to="),
        tokens=_ALL,
    ),
    whole=_whole,
    answer=(f"{_CHANNEL}final{_MESSAGE}", ""),
    reasoning_signs=Signs(template=(_CHANNEL, _MESSAGE, "analysis")),
    tool_signs=Signs(template=(_CHANNEL, _MESSAGE, "analysis")),
    source=("openai/harmony, docs/format.md", "OpenAI cookbook, 'OpenAI harmony response format'"),
)
