"""How answers are written: log-probabilities, time-outs, the feed."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from headrace.front.collector import Collector
from headrace.front.errors import RequestError
from headrace.params import SamplingParams
from headrace.server.answer import Answer
from headrace.server.completion_route import COMPLETION
from headrace.server.feed import Feed
from headrace.server.job import Job
from headrace.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, token_name
from headrace.text.tokenizer import ByteTokenizer
from headrace.types import Delta, Logprobs
from tests.front.making import TOKENIZER, counted, ids_of, make_builder

from .harness import events_of


class Twins(ByteTokenizer):
    """Ids 1 and 2 have the same text."""

    def token_bytes(self, token_id: int) -> bytes | None:
        return b"x" if token_id in (1, 2) else super().token_bytes(token_id)


class TestLogprobs:
    def test_what_json_can_not_carry(self) -> None:
        entry = Logprobs([97, 98, 99], [-math.inf, -1e9, math.nan], [1, 2, 3])
        for body in (
            chat_logprobs(TOKENIZER, [entry], 3),
            completion_logprobs(TOKENIZER, [97], [entry], 3, offset=0, hidden=frozenset()),
            prompt_logprobs(TOKENIZER, [None, entry]),
        ):
            text = json.dumps(body, allow_nan=False)
            assert text.count("-9999.0") >= 3

    def test_tokens_of_one_name_stay_apart(self) -> None:
        entry = Logprobs([1, 2, 97], [-1.0, -2.0, -3.0], [1, 2, 3])
        lists = completion_logprobs(Twins(), [1], [entry], 3, offset=0, hidden=frozenset())
        assert lists["top_logprobs"] == [{"x": -1.0, "x (id 2)": -2.0, "a": -3.0}]
        assert [top["token"] for top in chat_logprobs(Twins(), [entry], 3)[0]["top_logprobs"]] == ["x", "x", "a"]

    def test_the_chosen_token_is_there_beside_the_likeliest(self) -> None:
        entry = Logprobs([97, 98, 99], [-5.0, -1.0, -2.0], [7, 1, 2])
        lists = completion_logprobs(TOKENIZER, [97], [entry], 2, offset=0, hidden=frozenset())
        assert lists["top_logprobs"] == [{"b": -1.0, "c": -2.0, "a": -5.0}]
        assert lists["token_logprobs"] == [-5.0]
        (content,) = chat_logprobs(TOKENIZER, [entry], 1)
        assert content["token"] == "a" and [top["token"] for top in content["top_logprobs"]] == ["b"]

    def test_pieces_of_characters(self) -> None:
        assert token_name(TOKENIZER, 0xE2) == "bytes:\\xe2"
        ids = ids_of("a€b")
        entries = [Logprobs([i], [-1.0], [1]) for i in ids]
        lists = completion_logprobs(TOKENIZER, ids, entries, 0, offset=5, hidden=frozenset())
        assert lists["text_offset"] == [5, 6, 6, 6, 7] and lists["top_logprobs"] is None


def make_job(*, stream: bool, prompts: int = 1, **params: Any) -> Job:
    job = Job(Answer(api=COMPLETION, model="m", tokenizer=TOKENIZER, stream=stream), Feed())
    for _ in range(prompts):
        requests, resolved = make_builder().build(ids_of("hi"), SamplingParams(**params), allocate=counted())
        job.add(Collector(requests, resolved, tokenizer=TOKENIZER, streaming=stream))
    return job


def give(job: Job, prompt: int, **delta: Any) -> Any:
    collector = job.collectors[prompt]
    collector.receivers[0].apply(Delta(id=1, **delta))
    return job.write(collector)


class TestTimeouts:
    @pytest.mark.parametrize("stream", [False, True])
    def test_without_a_token_it_is_an_error(self, stream: bool) -> None:
        written = give(make_job(stream=stream), 0, finish="timeout")
        assert written.last and written.error is not None
        assert (written.error.status, written.error.code) == (504, "timeout")

    def test_with_tokens_it_is_an_answer(self) -> None:
        job = make_job(stream=False)
        give(job, 0, tokens=[97])
        written = give(job, 0, finish="timeout")
        assert json.loads(written.data)["choices"][0]["finish_reason"] == "timeout"


class TestJob:
    def test_one_message_may_end_several_prompts(self) -> None:
        job = make_job(stream=True, prompts=3)
        for collector in job.collectors:
            collector.receivers[0].apply(Delta(id=1, tokens=[97], finish="length"))
        written = [job.write(collector) for collector in job.collectors]
        assert [each.last for each in written] == [False, False, True]
        events = events_of(b"".join(each.data for each in written).decode())
        assert events[-1] == "[DONE]"
        assert [e["choices"][0]["index"] for e in events[:-1] if e["choices"][0]["finish_reason"]] == [0, 1, 2]

    def test_an_error_ends_a_stream_once(self) -> None:
        job = make_job(stream=True, prompts=2)
        assert give(job, 0, tokens=[97]).data
        events = events_of(give(job, 1, finish="error", error="broken").data.decode())
        assert events[0]["error"]["message"] == "broken" and events[1:] == ["[DONE]"]
        assert give(job, 0, tokens=[98], finish="length") == (b"", True, None)


class TestFeed:
    def test_pieces_gather_until_they_are_read(self) -> None:
        async def run() -> list[tuple[bytes, bool]]:
            feed = Feed()
            waiting = asyncio.create_task(feed.next())
            await asyncio.sleep(0)
            feed.put(b"a", last=False)
            feed.put(b"b", last=False)
            found = [await waiting]
            feed.put(b"c", last=True)
            feed.put(b"late", last=False)
            return [*found, await feed.next()]

        assert asyncio.run(run()) == [(b"ab", False), (b"c", True)]

    def test_a_failure_is_the_end(self) -> None:
        async def run() -> Feed:
            feed = Feed()
            feed.fail(RequestError("no"))
            feed.put(b"late", last=True)
            assert await feed.next() == (b"", True)
            return feed

        error = asyncio.run(run()).error
        assert error is not None and error.message == "no"
