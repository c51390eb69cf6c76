"""How /v1/responses writes its answers: the object, or the events of its coming into being."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, tokens_body, usage_body
from headrace.server.logprobs import chat_logprobs
from headrace.server.response_body import ResponseBody
from headrace.server.response_items import Item
from headrace.server.response_output import ResponseOutput, TypedEvent
from headrace.server.response_store import StoredResponse
from headrace.server.sse import typed_event

__all__ = ["Asked", "ResponseWriter"]

encode = msgspec.json.encode


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the answer repeats of its request, and where it is kept."""

    body: ResponseBody
    before: Sequence[Item]
    """The conversation that this request goes on with."""
    items: Sequence[Item]
    owner: str
    keep: Callable[[StoredResponse], None] | None
    """None: not stored."""


class ResponseWriter:
    """Of one answer; it has one choice."""

    def __init__(self, answer: Answer, asked: Asked) -> None:
        self._answer = answer
        self._asked = asked
        self._output = ResponseOutput()
        self._num_events = 0
        self._choice: Choice | None = None

    def response(self, collectors: Sequence[Collector]) -> bytes:
        choice = self._choice = collectors[0].best()[0]
        self._output.add(self._answer.events(choice), self._logprobs(choice, 0))
        self._output.end(cut=choice.finish != "stop")
        return self._finished(choice, self._answer.total_usage(collectors))

    def opening(self, choice: Choice, prompt: int) -> bytes:
        self._choice = choice
        begun = self._body("in_progress")
        return self._told({"type": "response.created", "response": begun}) + self._told(
            {"type": "response.in_progress", "response": begun}
        )

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int, events_from: int) -> bytes:
        events = self._answer.events(choice, parts_from=parts_from, events_from=events_from)
        if not events:
            return b""
        return self._tell(self._output.add(events, self._logprobs(choice, tokens_from)))

    def end(self, choice: Choice, prompt: int) -> bytes:
        return self._tell(self._output.end(cut=choice.finish != "stop"))

    def closing(self, usage: TokenUsage) -> bytes:
        assert self._choice is not None
        body = self._finished(self._choice, usage)
        return self._told({"type": f"response.{_status(self._choice)}", "response": msgspec.Raw(body)})

    def failure(self, error: RequestError) -> bytes:
        told = self._tell(self._output.end(cut=True))
        body = self._body("failed", error=error.message)
        return told + self._told({"type": "response.failed", "response": body})

    # ---- parts -------------------------------------------------------------------------------

    def _logprobs(self, choice: Choice, tokens_from: int) -> list[Any]:
        answer = self._answer
        if answer.shown.logprobs is None:
            return []
        return chat_logprobs(answer.tokenizer, choice.logprobs[tokens_from:], answer.shown.logprobs)

    def _tell(self, events: list[TypedEvent]) -> bytes:
        return b"".join([self._told(event) for event in events])

    def _told(self, event: TypedEvent) -> bytes:
        number = self._num_events
        self._num_events += 1
        return typed_event({**event, "sequence_number": number})

    def _finished(self, choice: Choice, usage: TokenUsage) -> bytes:
        """The whole object; kept, if it is to be kept."""
        asked, answer = self._asked, self._answer
        error = None if choice.finish in ("stop", "length") else f"the request ended early: {choice.finish}"
        body = encode({**self._body(_status(choice), usage=usage, error=error), **tokens_body(answer, choice)})
        if asked.keep is not None:
            asked.keep(
                StoredResponse.of(
                    answer.id,
                    asked.owner,
                    body,
                    before=asked.before,
                    input_items=asked.items,
                    output=self._output.items,
                )
            )
        return body

    def _body(self, status: str, *, usage: TokenUsage | None = None, error: str | None = None) -> dict[str, Any]:
        answer, body = self._answer, self._asked.body
        assert self._choice is not None
        params = self._choice.collector.params
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": answer.model,
            "output": [] if status == "in_progress" else self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": _given(body.reasoning) or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self._asked.keep is not None,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **_given(body.text)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _given(options: Any) -> dict[str, Any]:
    return {} if options is None else options.model_dump(exclude_none=True)


def _status(choice: Choice) -> str:
    return {"stop": "completed", "length": "incomplete"}.get(str(choice.finish), "failed")


def _usage(usage: TokenUsage) -> dict[str, Any]:
    chat = usage_body(usage)
    return {
        **({"timing": chat["timing"]} if "timing" in chat else {}),
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": chat["completion_tokens_details"],
        "total_tokens": chat["total_tokens"],
    }
