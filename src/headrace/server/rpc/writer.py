"""How /trtllm.TrtllmService/Generate writes its answers, on the thread that makes all text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage
from headrace.server.answer import Answer, Api, finish_name
from headrace.server.logprobs import ranked
from headrace.server.rpc.frames import chunk_frame, error_frame, message_frame
from headrace.server.rpc.messages import message
from headrace.types import Logprobs, RequestTimes

__all__ = ["Writer", "api_of"]

GenerateResponse = message("GenerateResponse")


def api_of(*, keeps_stop_token: bool, has_times: bool) -> Api:
    """Of one request."""

    def writer(answer: Answer) -> Writer:
        return Writer(answer, keeps_stop_token=keeps_stop_token, has_times=has_times)

    return Api("gen-", writer, prompt="tokenized", has_free_ids=True, operation="text_completion")


class Writer:
    """Frames of `GenerateResponse` messages. Implements `answer.Route`."""

    def __init__(self, answer: Answer, *, keeps_stop_token: bool, has_times: bool) -> None:
        """`keeps_stop_token`: the token that ended the output is part of it; otherwise EOS isn't, either."""
        self._answer = answer
        self._keeps_stop_token = keeps_stop_token
        self._has_times = has_times

    def response(self, collectors: Sequence[Collector]) -> bytes:
        return b"".join(self._complete(choice) for collector in collectors for choice in collector.best())

    def opening(self, choice: Choice, prompt: int) -> bytes:
        return b""

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int, events_from: int) -> bytes:
        ids = self._ids(choice)[tokens_from:]
        if not ids:
            return b""
        response = GenerateResponse(request_id=self._answer.id)
        chunk = response.chunk
        chunk.token_ids.extend(ids)
        chunk.sequence_index = choice.index
        self._count(chunk, choice)
        self._add_logprobs(chunk.logprobs, choice.logprobs[tokens_from : tokens_from + len(ids)])
        return chunk_frame(response.SerializeToString(), choice.index)

    def end(self, choice: Choice, prompt: int) -> bytes:
        return self._complete(choice)

    def closing(self, usage: TokenUsage) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return error_frame(error)

    def _complete(self, choice: Choice) -> bytes:
        response = GenerateResponse(request_id=self._answer.id)
        complete = response.complete
        ids = self._ids(choice)
        complete.output_token_ids.extend(ids)
        complete.sequence_index = choice.index
        complete.finish_reason = finish_name(choice)
        if isinstance(choice.stop_reason, int):
            complete.matched_token_id = choice.stop_reason
        elif choice.stop_reason is not None:
            complete.matched_stop_str = choice.stop_reason
        self._count(complete, choice)
        self._add_logprobs(complete.logprobs, choice.logprobs[: len(ids)])
        if self._answer.shown.prompt_logprobs:
            self._add_logprobs(complete.prompt_logprobs, choice.collector.prompt_logprobs or ())
        if self._has_times and choice.times is not None:
            _add_times(complete.perf_metrics, choice.times)
        return message_frame(response.SerializeToString())

    def _ids(self, choice: Choice) -> list[int]:
        """Without the EOS token that ended them, unless stop tokens are wanted."""
        ids = choice.token_ids
        if self._keeps_stop_token or choice.finish != "stop" or choice.stop_reason is not None or not ids:
            return ids
        return ids[:-1] if ids[-1] in choice.collector.first.stop_ids else ids

    @staticmethod
    def _count(part: Any, choice: Choice) -> None:
        part.prompt_tokens = len(choice.collector.prompt)
        part.completion_tokens = choice.num_generated
        part.cached_tokens = max(choice.collector.cached_tokens, 0)

    def _add_logprobs(self, field: Any, entries: Sequence[Logprobs | None]) -> None:
        for entry in entries:
            if entry is None:  # of the prompt's first token there is none
                continue
            one = field.add(token_id=entry.ids[0], logprob=entry.values[0])
            if len(entry.ids) > 1:
                for at in ranked(entry):
                    one.top_logprobs.add(token_id=entry.ids[at], logprob=entry.values[at])


def _add_times(part: Any, times: RequestTimes) -> None:
    offset_s = time.time() - time.monotonic()
    for name, value in (
        ("arrival_time", times.arrival_s),
        ("first_scheduled_time", times.first_scheduled_s),
        ("first_token_time", times.first_token_s),
        ("last_token_time", times.last_token_s),
    ):
        if value:
            setattr(part, name, value + offset_s)
