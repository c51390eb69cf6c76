"""What the streams of chat and of completion chunks have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.front.collector import Choice
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, usage_body
from headrace.server.sse import DONE, data_event

__all__ = ["Chunks"]

encode = msgspec.json.encode


class Chunks:
    """Of one answer. The constant parts of the usual chunk are made once."""

    def __init__(self, answer: Answer, name: str, *, before: bytes, after: bytes) -> None:
        """`name` is the chunks' `object`; `before` and `after` stand around the text of a choice, behind its index."""
        self._answer = answer
        self._name = name
        self._start = b"data: " + encode(self.body([]))[: -len(b"[]}")] + b'[{"index":'
        self._before = before
        usage = b',"usage":null' if answer.usage.at_end else b""
        self._after = after + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._heads: dict[int, bytes] = {}
        self.are_plain = not (answer.shown.of_tokens or answer.usage.in_pieces)
        """A piece has nothing but its text."""

    def plain(self, number: int, text: str) -> bytes:
        """The chunk of a choice's text, if `are_plain`."""
        head = self._heads.get(number)
        if head is None:
            head = self._heads[number] = self._start + str(number).encode() + self._before
        return head + encode(text) + self._after

    def event(self, entry: dict[str, Any], choice: Choice, **extra: Any) -> bytes:
        """The chunk of one choice's entry."""
        body = {**self.body([entry]), **extra}
        usage = self._answer.usage
        if usage.in_pieces:
            body["usage"] = usage_body(choice.collector.usage())
        elif usage.at_end:
            body["usage"] = None
        return data_event(body)

    def closing(self, usage: TokenUsage) -> bytes:
        if not self._answer.usage.at_end:
            return DONE
        return data_event({**self.body([]), "usage": usage_body(usage)}) + DONE

    def body(self, choices: Sequence[Any]) -> dict[str, Any]:
        answer = self._answer
        return {
            "id": answer.id,
            "object": self._name,
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
        }
