"""The output items of one response as they come into being, with the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.server.parsers.port import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning

__all__ = ["ResponseOutput", "TypedEvent"]

TypedEvent = dict[str, Any]
"""An event of the stream, without its number."""


@dataclass(slots=True)
class _Open:
    """An item that is being written."""

    kind: str
    id: str
    place: int
    """Its index in the output."""
    name: str = ""
    call_id: str = ""
    parts: list[str] = field(default_factory=list[str])
    logprobs: list[Any] = field(default_factory=list[Any])

    def as_item(self, status: str) -> dict[str, Any]:
        """With what has come so far; an item that has just begun has no parts."""
        text = "".join(self.parts)
        if self.kind == "function_call":
            return {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id,
                    "name": self.name, "arguments": text}  # fmt: skip
        content = [self.part(text)] if self.parts or status != "in_progress" else []
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if text else []}


PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseOutput:
    """At most one message or reasoning item is open at a time; calls may be open beside each other."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """Finished ones, and what the open ones had when they began."""
        self._text: _Open | None = None
        self._calls: dict[int, _Open] = {}

    def add(self, events: Iterable[Event], logprobs: list[Any]) -> list[TypedEvent]:
        """What the parser told; `logprobs` are of the tokens that came with it."""
        told: list[TypedEvent] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                kind = "message" if isinstance(event, Content) else "reasoning"
                told += self._add_text(kind, event.text, logprobs)
                logprobs = []
            elif isinstance(event, CallBegin):
                told += self._close_text("completed")
                call = self._calls[event.index] = self._open("function_call", name=event.name, call_id=event.id)
                told.append(self._added(call))
            elif isinstance(event, CallArguments):
                call = self._calls[event.index]
                call.parts.append(event.text)
                told.append({"type": "response.function_call_arguments.delta", "item_id": call.id,
                             "output_index": call.place, "delta": event.text})  # fmt: skip
            else:
                assert isinstance(event, CallEnd)
                told += self._close_call(self._calls.pop(event.index), "completed")
        return told

    def end(self, *, cut: bool) -> list[TypedEvent]:
        """No more will come; `cut`: the output ended before the model had finished it."""
        told: list[TypedEvent] = []
        if not self.items:  # an answer without a word is an empty message
            told += self._add_text("message", "", [])
        for call in list(self._calls.values()):  # a call without its end is no whole call
            told += self._close_call(call, "incomplete")
        self._calls.clear()
        return told + self._close_text("incomplete" if cut else "completed")

    def _add_text(self, kind: str, text: str, logprobs: list[Any]) -> list[TypedEvent]:
        told: list[TypedEvent] = []
        if self._text is None or self._text.kind != kind:
            told += self._close_text("completed")
            self._text = self._open(kind)
            told += [self._added(self._text), self._part_event(self._text, "added", "")]
        item = self._text
        delta = {"type": f"{TEXT_EVENTS[kind]}.delta", **_place(item), "delta": text}
        if kind == "message":
            delta["logprobs"] = logprobs
            item.logprobs += logprobs
        item.parts.append(text)
        return [*told, delta] if text else told

    def _close_text(self, status: str) -> list[TypedEvent]:
        item, self._text = self._text, None
        if item is None:
            return []
        text = "".join(item.parts)
        done = {"type": f"{TEXT_EVENTS[item.kind]}.done", **_place(item), "text": text}
        if item.kind == "message":
            done["logprobs"] = item.logprobs
        return [done, self._part_event(item, "done", text), self._item_done(item, status)]

    def _close_call(self, call: _Open, status: str) -> list[TypedEvent]:
        arguments = "".join(call.parts)
        done = {"type": "response.function_call_arguments.done", "item_id": call.id, "output_index": call.place,
                "name": call.name, "arguments": arguments}  # fmt: skip
        return [done, self._item_done(call, status)]

    def _open(self, kind: str, *, name: str = "", call_id: str = "") -> _Open:
        item = _Open(kind, PREFIXES[kind] + uuid.uuid4().hex, len(self.items), name, call_id)
        self.items.append(item.as_item("in_progress"))
        return item

    def _added(self, item: _Open) -> TypedEvent:
        return {
            "type": "response.output_item.added",
            "output_index": item.place,
            "item": item.as_item("in_progress"),
        }

    def _item_done(self, item: _Open, status: str) -> TypedEvent:
        self.items[item.place] = item.as_item(status)
        return {"type": "response.output_item.done", "output_index": item.place, "item": self.items[item.place]}

    @staticmethod
    def _part_event(item: _Open, what: str, text: str) -> TypedEvent:
        return {"type": f"response.content_part.{what}", **_place(item), "part": item.part(text)}


def _place(item: _Open) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.place, "content_index": 0}
