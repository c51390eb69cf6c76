"""How /v1/messages writes its answers: the message, or the events of its coming into being."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, Api, tokens_body
from headrace.server.anthropic_errors import anthropic_error_body
from headrace.server.parsers.port import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from headrace.server.sse import typed_event

__all__ = ["MESSAGE", "MessageWriter"]

encode = msgspec.json.encode

EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Blocks as they begin."""


class MessageWriter:
    """Of one answer; it has one choice. Blocks come one after another."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks: list[dict[str, Any]] = []
        """Finished ones, and the open one as it began."""
        self._parts: list[str] = []
        """Of the open one."""
        self._is_open = False

    def response(self, collectors: Sequence[Collector]) -> bytes:
        choice = collectors[0].best()[0]
        self._take(self._answer.events(choice))
        self._close()
        message = self._message(choice)
        return encode(
            {
                **message,
                **self._ending(choice),
                "content": self._blocks,
                "usage": _usage(self._answer.total_usage(collectors)),
                **tokens_body(self._answer, choice),
            }
        )

    def opening(self, choice: Choice, prompt: int) -> bytes:
        usage = {**_usage(choice.collector.usage()), "output_tokens": 0}
        message = {**self._message(choice), "usage": usage}
        if self._answer.shown.ids:
            message["prompt_token_ids"] = choice.collector.prompt
        started = {"type": "message_start", "message": message}
        return typed_event(started) + typed_event({"type": "ping"})

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int, events_from: int) -> bytes:
        events = self._answer.events(choice, parts_from=parts_from, events_from=events_from)
        return b"".join(map(typed_event, self._take(events)))

    def end(self, choice: Choice, prompt: int) -> bytes:
        delta: dict[str, Any] = {"type": "message_delta", "delta": self._ending(choice)}
        delta["usage"] = _usage(self._answer.total_usage([choice.collector]))
        if self._answer.shown.ids:
            delta["token_ids"] = choice.token_ids
        return b"".join(map(typed_event, [*self._close(), delta, {"type": "message_stop"}]))

    def closing(self, usage: TokenUsage) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return typed_event(anthropic_error_body(error))

    # ---- parts -------------------------------------------------------------------------------

    def _take(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """-> the events of the stream."""
        told: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Content):
                told += self._begin("text")
                told.append(self._delta({"type": "text_delta", "text": event.text}, event.text))
            elif isinstance(event, Reasoning):
                told += self._begin("thinking")
                told.append(self._delta({"type": "thinking_delta", "thinking": event.text}, event.text))
            elif isinstance(event, CallBegin):
                told += self._close()
                told += self._open({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            elif isinstance(event, CallArguments):
                told.append(self._delta({"type": "input_json_delta", "partial_json": event.text}, event.text))
            else:
                assert isinstance(event, CallEnd)
                told += self._close()
        return told

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        """A block of this kind is open from here on."""
        if self._is_open and self._blocks[-1]["type"] == kind:
            return []
        return [*self._close(), *self._open(EMPTY[kind])]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._blocks.append(block)
        self._parts.clear()
        self._is_open = True
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}]

    def _delta(self, delta: dict[str, Any], text: str) -> dict[str, Any]:
        self._parts.append(text)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        block, text = self._blocks[-1], "".join(self._parts)
        if block["type"] == "tool_use":
            self._blocks[-1] = {**block, "input": _input(text)}
        else:
            self._blocks[-1] = {**block, block["type"]: text}
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _ending(self, choice: Choice) -> dict[str, Any]:
        """`stop_reason`; ends that this API doesn't know (a time limit) keep their own name."""
        found: str | None = None
        if choice.finish != "stop":
            reason = "max_tokens" if choice.finish == "length" else str(choice.finish)
        elif isinstance(choice.stop_reason, str):
            reason, found = "stop_sequence", choice.stop_reason
        else:
            reason = "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": found}

    def _message(self, choice: Choice) -> dict[str, Any]:
        answer = self._answer
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }


MESSAGE = Api("msg_", MessageWriter)


def _usage(usage: TokenUsage) -> dict[str, Any]:
    """`input_tokens` are those that had to be computed."""
    return {
        **({"timing": usage.timing.body} if usage.timing is not None else {}),
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _input(text: str) -> dict[str, Any]:
    """A call that was cut off has no valid JSON; its text is not lost."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"INVALID_JSON": text}
