"""How /v1/completions writes its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.front.collector import Choice, Collector
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, finish_name, usage_body
from headrace.server.logprobs import completion_logprobs, prompt_logprobs
from headrace.types import Logprobs

__all__ = ["CompletionRoute"]

encode = msgspec.json.encode


class CompletionRoute:
    """One answer's writer. The constant parts of a chunk are made once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        start = encode(self._body([]))[: -len(b"[]}")]
        self._before = b"data: " + start + b'[{"index":'
        self._heads: dict[int, bytes] = {}
        usage = b',"usage":null' if answer.include_usage else b""
        self._after = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._plain = answer.logprobs is None and not answer.return_token_ids and not answer.continuous_usage

    def response(self, collectors: Sequence[Collector]) -> bytes:
        answer = self._answer
        choices = [
            self._choice(choice, prompt) for prompt, collector in enumerate(collectors) for choice in collector.best()
        ]
        return encode({**self._body(choices), "usage": usage_body(answer.total_usage(collectors))})

    def opening(self, choice: Choice, prompt: int) -> bytes:
        """The prompt, for a request that wants it back."""
        answer = self._answer
        if answer.echo is None:
            return b""
        entry: dict[str, Any] = {"index": self._number(choice, prompt), "text": answer.echo[prompt], "logprobs": None,
                 "finish_reason": None}  # fmt: skip
        if answer.logprobs is not None:
            collector = choice.collector
            entries = self._prompt_entries(collector)
            entry["logprobs"] = self._lists(choice, collector.prompt, entries, answer.logprobs, offset=0)
        return self._event(entry, choice)

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int) -> bytes:
        parts = choice.parts[parts_from:]
        text = parts[0] if len(parts) == 1 else "".join(parts)
        if self._plain:
            return self._plain_piece(self._number(choice, prompt), text) if text else b""
        if not text and tokens_from == len(choice.token_ids):
            return b""
        entry: dict[str, Any] = {
            "index": self._number(choice, prompt),
            "text": text,
            "logprobs": self._logprobs(choice, prompt, parts_from=parts_from, tokens_from=tokens_from),
            "finish_reason": None,
        }
        if self._answer.return_token_ids:
            entry["token_ids"] = choice.token_ids[tokens_from:]
        return self._event(entry, choice)

    def _plain_piece(self, number: int, text: str) -> bytes:
        head = self._heads.get(number)
        if head is None:
            head = self._heads[number] = self._before + b'%d,"text":' % number
        return head + encode(text) + self._after

    def end(self, choice: Choice, prompt: int) -> bytes:
        entry = {
            "index": self._number(choice, prompt),
            "text": "",
            "logprobs": None,
            "finish_reason": finish_name(choice),
            "stop_reason": choice.stop_reason,
        }
        return self._event(entry, choice)

    def usage(self, usage: TokenUsage) -> bytes:
        return b"data: " + encode({**self._body([]), "usage": usage_body(usage)}) + b"\n\n"

    def _number(self, choice: Choice, prompt: int) -> int:
        return prompt * self._answer.n + choice.index

    def _choice(self, choice: Choice, prompt: int) -> dict[str, Any]:
        answer, collector = self._answer, choice.collector
        echoed = answer.echo[prompt] if answer.echo is not None else ""
        shown: dict[str, Any] = {
            "index": self._number(choice, prompt),
            "text": echoed + choice.text,
            "logprobs": None,
            "finish_reason": finish_name(choice),
            "stop_reason": choice.stop_reason,
        }
        if answer.logprobs is not None:
            ids: list[int] = choice.token_ids
            entries: list[Logprobs | None] = [*choice.logprobs]
            if answer.echo is not None:
                ids = [*collector.prompt, *ids]
                entries = [*self._prompt_entries(collector), *entries]
            shown["logprobs"] = self._lists(choice, ids, entries, answer.logprobs, offset=0)
        if answer.prompt_logprobs:
            shown["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, collector.prompt_logprobs or [])
        if answer.return_token_ids:
            shown["token_ids"] = choice.token_ids
            shown["prompt_token_ids"] = collector.prompt
        return shown

    def _logprobs(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int) -> dict[str, Any] | None:
        answer = self._answer
        if answer.logprobs is None:
            return None
        before = len(answer.echo[prompt]) if answer.echo is not None else 0
        before += sum(len(part) for part in choice.parts[:parts_from])
        ids, entries = choice.token_ids[tokens_from:], choice.logprobs[tokens_from:]
        return self._lists(choice, ids, entries, answer.logprobs, offset=before)

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

    def _event(self, entry: dict[str, Any], choice: Choice) -> bytes:
        body = self._body([entry])
        if self._answer.continuous_usage:
            body["usage"] = usage_body(choice.collector.usage())
        elif self._answer.include_usage:
            body["usage"] = None
        return b"data: " + encode(body) + b"\n\n"

    def _body(self, choices: list[Any]) -> dict[str, Any]:
        answer = self._answer
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
        }
