"""How /v1/chat/completions writes its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, Api, finish_name, usage_body
from headrace.server.chat_message import deltas, has_calls, parsed_message
from headrace.server.chunks import Chunks
from headrace.server.errors import error_event
from headrace.server.logprobs import chat_logprobs, prompt_logprobs
from headrace.server.parsers.port import Event

__all__ = ["CHAT", "ChatRoute"]

encode = msgspec.json.encode


class ChatRoute:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._chunks = Chunks(answer, "chat.completion.chunk", before=b',"delta":{"content":', after=b"}")

    def response(self, collectors: Sequence[Collector]) -> bytes:
        answer, collector = self._answer, collectors[0]
        choices = [self._choice(choice) for choice in collector.best()]
        body: dict[str, Any] = {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            "usage": usage_body(answer.total_usage(collectors)),
        }
        if answer.shown.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, collector.prompt_logprobs or [])
        if answer.shown.ids:
            body["prompt_token_ids"] = collector.prompt
        return encode(body)

    def opening(self, choice: Choice, prompt: int) -> bytes:
        return self._event(choice, {"role": "assistant", "content": ""}, first=True)

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int, events_from: int) -> bytes:
        if self._answer.has_parser:
            return self._parsed_piece(choice, choice.events[events_from:], tokens_from)
        parts = choice.parts[parts_from:]
        text = parts[0] if len(parts) == 1 else "".join(parts)
        if self._chunks.are_plain:
            return self._chunks.plain(choice.index, text) if text else b""
        if not text and tokens_from == len(choice.token_ids):
            return b""
        return self._event(choice, {"content": text}, tokens_from=tokens_from)

    def _parsed_piece(self, choice: Choice, events: Sequence[Event], tokens_from: int) -> bytes:
        """A chunk for each event; what is told of the tokens comes with the first."""
        pieces: list[bytes] = []
        for delta in deltas(events):
            if self._chunks.are_plain and "content" in delta:
                pieces.append(self._chunks.plain(choice.index, delta["content"]))
            else:
                pieces.append(self._event(choice, delta, tokens_from=None if pieces else tokens_from))
        if not pieces and not self._chunks.are_plain and tokens_from < len(choice.token_ids):
            pieces.append(self._event(choice, {}, tokens_from=tokens_from))
        return b"".join(pieces)

    def end(self, choice: Choice, prompt: int) -> bytes:
        return self._event(choice, {}, finish=self._finish(choice))

    def closing(self, usage: TokenUsage) -> bytes:
        return self._chunks.closing(usage)

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        answer = self._answer
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": self._logprobs(choice, 0),
            "finish_reason": self._finish(choice),
            "stop_reason": choice.stop_reason,
        }
        if answer.shown.ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _message(self, choice: Choice) -> dict[str, Any]:
        if self._answer.has_parser:
            return parsed_message(choice.events)
        return {"role": "assistant", "content": choice.text, "refusal": None}

    def _finish(self, choice: Choice) -> str:
        """As OpenAI has it: a call that the client has named itself ends with `stop`."""
        if choice.finish == "stop" and self._answer.tool_use.choice != "named" and has_calls(choice.events):
            return "tool_calls"
        return finish_name(choice)

    def _event(
        self,
        choice: Choice,
        delta: dict[str, Any],
        *,
        tokens_from: int | None = None,
        finish: str | None = None,
        first: bool = False,
    ) -> bytes:
        answer = self._answer
        entry: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            entry["stop_reason"] = choice.stop_reason
        if tokens_from is not None:
            entry["logprobs"] = self._logprobs(choice, tokens_from)
            if answer.shown.ids:
                entry["token_ids"] = choice.token_ids[tokens_from:]
        prompt = {"prompt_token_ids": choice.collector.prompt} if first and answer.shown.ids else {}
        return self._chunks.event(entry, choice, **prompt)

    def _logprobs(self, choice: Choice, tokens_from: int) -> dict[str, Any] | None:
        answer = self._answer
        if answer.shown.logprobs is None:
            return None
        entries = choice.logprobs[tokens_from:]
        return {"content": chat_logprobs(answer.tokenizer, entries, answer.shown.logprobs), "refusal": None}


CHAT = Api("chatcmpl-", ChatRoute, has_free_ids=True)
