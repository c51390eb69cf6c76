"""How /v1/chat/completions writes its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.front.collector import Choice, Collector
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, finish_name, usage_body
from headrace.server.logprobs import chat_logprobs, prompt_logprobs

__all__ = ["ChatRoute"]

encode = msgspec.json.encode


class ChatRoute:
    """One answer's writer. The constant parts of a chunk are made once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        start = encode(self._chunk([]))[: -len(b"[]}")]
        self._before = b"data: " + start + b'[{"index":'
        self._heads: dict[int, bytes] = {}
        usage = b',"usage":null' if answer.include_usage else b""
        self._after = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._plain = answer.logprobs is None and not answer.return_token_ids and not answer.continuous_usage

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
        if answer.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, collector.prompt_logprobs or [])
        if answer.return_token_ids:
            body["prompt_token_ids"] = collector.prompt
        return encode(body)

    def opening(self, choice: Choice, prompt: int) -> bytes:
        return self._event(choice, {"role": "assistant", "content": ""}, first=True)

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int) -> bytes:
        parts = choice.parts[parts_from:]
        text = parts[0] if len(parts) == 1 else "".join(parts)
        if self._plain:
            return self._plain_piece(choice.index, text) if text else b""
        if not text and tokens_from == len(choice.token_ids):
            return b""
        return self._event(choice, {"content": text}, tokens_from=tokens_from)

    def _plain_piece(self, number: int, text: str) -> bytes:
        head = self._heads.get(number)
        if head is None:
            head = self._heads[number] = self._before + b'%d,"delta":{"content":' % number
        return head + encode(text) + self._after

    def end(self, choice: Choice, prompt: int) -> bytes:
        return self._event(choice, {}, finish=finish_name(choice))

    def usage(self, usage: TokenUsage) -> bytes:
        return b"data: " + encode({**self._chunk([]), "usage": usage_body(usage)}) + b"\n\n"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        answer = self._answer
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice, 0),
            "finish_reason": finish_name(choice),
            "stop_reason": choice.stop_reason,
        }
        if answer.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

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
            if answer.return_token_ids:
                entry["token_ids"] = choice.token_ids[tokens_from:]
        body = self._chunk([entry])
        if first and answer.return_token_ids:
            body["prompt_token_ids"] = choice.collector.prompt
        if answer.continuous_usage:
            body["usage"] = usage_body(choice.collector.usage())
        elif answer.include_usage:
            body["usage"] = None
        return b"data: " + encode(body) + b"\n\n"

    def _logprobs(self, choice: Choice, tokens_from: int) -> dict[str, Any] | None:
        answer = self._answer
        if answer.logprobs is None:
            return None
        entries = choice.logprobs[tokens_from:]
        return {"content": chat_logprobs(answer.tokenizer, entries, answer.logprobs), "refusal": None}

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        answer = self._answer
        return {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
        }
