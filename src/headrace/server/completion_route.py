"""How /v1/completions writes its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, Api, finish_name, usage_body
from headrace.server.chunks import Chunks
from headrace.server.errors import error_event
from headrace.server.logprobs import completion_logprobs, prompt_logprobs
from headrace.types import Logprobs

__all__ = ["COMPLETION", "CompletionRoute"]

encode = msgspec.json.encode


class CompletionRoute:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._chunks = Chunks(answer, "text_completion", before=b',"text":', after=b"")

    def response(self, collectors: Sequence[Collector]) -> bytes:
        answer = self._answer
        choices = [
            self._choice(choice, prompt) for prompt, collector in enumerate(collectors) for choice in collector.best()
        ]
        return encode({**self._chunks.body(choices), "usage": usage_body(answer.total_usage(collectors))})

    def opening(self, choice: Choice, prompt: int) -> bytes:
        """The prompt, for a request that wants it back."""
        shown = self._answer.shown
        if shown.echo is None:
            return b""
        entry: dict[str, Any] = {"index": self._number(choice, prompt), "text": shown.echo[prompt], "logprobs": None,
                 "finish_reason": None}  # fmt: skip
        if shown.logprobs is not None:
            collector = choice.collector
            entries = self._prompt_entries(collector)
            entry["logprobs"] = self._lists(choice, collector.prompt, entries, shown.logprobs, offset=0)
        if shown.ids:
            entry["prompt_token_ids"] = choice.collector.prompt
        return self._chunks.event(entry, choice)

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int, events_from: int) -> bytes:
        parts = choice.parts[parts_from:]
        text = parts[0] if len(parts) == 1 else "".join(parts)
        if self._chunks.are_plain:
            return self._chunks.plain(self._number(choice, prompt), text) if text else b""
        if not text and tokens_from == len(choice.token_ids):
            return b""
        entry: dict[str, Any] = {
            "index": self._number(choice, prompt),
            "text": text,
            "logprobs": self._logprobs(choice, prompt, parts_from=parts_from, tokens_from=tokens_from),
            "finish_reason": None,
        }
        shown = self._answer.shown
        if shown.ids:
            entry["token_ids"] = choice.token_ids[tokens_from:]
            if tokens_from == 0 and shown.echo is None:
                entry["prompt_token_ids"] = choice.collector.prompt
        return self._chunks.event(entry, choice)

    def end(self, choice: Choice, prompt: int) -> bytes:
        entry = {
            "index": self._number(choice, prompt),
            "text": "",
            "logprobs": None,
            "finish_reason": finish_name(choice),
            "stop_reason": choice.stop_reason,
        }
        return self._chunks.event(entry, choice)

    def closing(self, usage: TokenUsage) -> bytes:
        return self._chunks.closing(usage)

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    def _number(self, choice: Choice, prompt: int) -> int:
        return prompt * self._answer.n + choice.index

    def _choice(self, choice: Choice, prompt: int) -> dict[str, Any]:
        tokenizer, shown, collector = self._answer.tokenizer, self._answer.shown, choice.collector
        echoed = shown.echo[prompt] if shown.echo is not None else ""
        entry: dict[str, Any] = {
            "index": self._number(choice, prompt),
            "text": echoed + choice.text,
            "logprobs": None,
            "finish_reason": finish_name(choice),
            "stop_reason": choice.stop_reason,
        }
        if shown.logprobs is not None:
            ids: list[int] = choice.token_ids
            entries: list[Logprobs | None] = [*choice.logprobs]
            if shown.echo is not None:
                ids = [*collector.prompt, *ids]
                entries = [*self._prompt_entries(collector), *entries]
            entry["logprobs"] = self._lists(choice, ids, entries, shown.logprobs, offset=0)
        if shown.prompt_logprobs:
            entry["prompt_logprobs"] = prompt_logprobs(tokenizer, collector.prompt_logprobs or [])
        if shown.ids:
            entry["token_ids"] = choice.token_ids
            entry["prompt_token_ids"] = collector.prompt
        return entry

    def _logprobs(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int) -> dict[str, Any] | None:
        shown = self._answer.shown
        if shown.logprobs is None:
            return None
        before = len(shown.echo[prompt]) if shown.echo is not None else 0
        before += sum(len(part) for part in choice.parts[:parts_from])
        ids, entries = choice.token_ids[tokens_from:], choice.logprobs[tokens_from:]
        return self._lists(choice, ids, entries, shown.logprobs, offset=before)

    def _lists(
        self, choice: Choice, ids: Sequence[int], entries: Sequence[Logprobs | None], count: int, *, offset: int
    ) -> dict[str, Any]:
        tokenizer = self._answer.tokenizer
        skips = choice.collector.params.skip_special_tokens
        hidden = tokenizer.special_ids if tokenizer is not None and skips else frozenset[int]()
        return completion_logprobs(tokenizer, ids, entries, count, offset=offset, hidden=hidden)

    @staticmethod
    def _prompt_entries(collector: Collector) -> list[Logprobs | None]:
        return collector.prompt_logprobs or [None] * len(collector.prompt)


COMPLETION = Api("cmpl-", CompletionRoute, prompt="prompt", has_free_ids=True, operation="text_completion")
