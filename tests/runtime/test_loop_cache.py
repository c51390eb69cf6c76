"""What front ends can ask about the KV cache of a running loop: events, pins, statistics."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import wire
from headrace.engine.fake import FakeEngine
from headrace.types import Delta, Retention, RetentionRange

from .test_loop import Front, request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
KV = {"tokens_per_block": 4, "max_tokens": 400, "event_buffer_max_size": 100}


class Asking(Front):
    def __init__(
        self, engine: FakeEngine | None = None, *, kv: dict[str, Any] | None = None, **changes: object
    ) -> None:
        super().__init__(engine or FakeEngine(vocab_size=50), kv_cache_config={**KV, **(kv or {})}, **changes)
        ready = self.messages.get(timeout=10)
        assert isinstance(ready, wire.Ready), ready
        self.info = ready.info

    def ask(self, question: wire.Question) -> Any:
        self.runtime.send(question)
        while isinstance(answer := self.messages.get(timeout=10), wire.Outputs):
            pass
        return answer

    def events(self) -> list[dict[str, Any]]:
        return self.ask(wire.GetKvEvents()).events

    def last_delta(self, number: int) -> Delta:
        while True:
            message = self.messages.get(timeout=10)
            assert isinstance(message, wire.Outputs), message
            for delta in message.deltas:
                if delta.id == number and delta.finish is not None:
                    return delta

    def run(self, number: int, prompt: list[int] = PROMPT, **changes: object) -> Delta:
        self.runtime.send(wire.Submit([request(number, prompt=prompt, **changes)]))
        return self.last_delta(number)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()


def test_events_of_a_request() -> None:
    with Asking() as front:
        (created,) = front.events()
        assert created["event_id"] == 0 and created["data"]["num_blocks_per_cache_level"] == [100]
        front.run(1, max_tokens=1, cache_salt="s")
        events = front.events()
        assert [event["event_id"] for event in events] == list(range(1, 1 + len(events)))
        blocks = [block for event in events for block in event["data"]["blocks"]]
        assert [token["token_id"] for block in blocks[:2] for token in block["tokens"]] == PROMPT[:8]
        assert {block["cache_salt"] for block in blocks} == {"s"}
        assert all("attention_dp_rank" not in event for event in events)
        assert front.events() == []


def test_the_priority_of_events_is_the_requests() -> None:
    keep = Retention(ranges=(RetentionRange(0, 4, 90), RetentionRange(4, None, 10)), decode_priority=1)
    with Asking() as front:
        front.events()
        front.run(1, max_tokens=8, retention=keep)
        blocks = [block for event in front.events() for block in event["data"]["blocks"]]
        assert [block["priority"] for block in blocks] == [90, 10, 10, 1]


def test_events_of_several_sections_say_whose_they_are() -> None:
    with Asking(FakeEngine(vocab_size=50, num_sections=2)) as front:
        created = front.events()
        assert [(event["attention_dp_rank"], event["event_id"]) for event in created] == [(0, 0), (1, 0)]


def test_a_pin_survives_and_is_given_up() -> None:
    with Asking(kv={"max_tokens": 80}) as front:
        assert front.ask(wire.GetPins(7)) == wire.Pins(7, [])
        assert front.run(1, pin="system", max_tokens=1).finish == "length"
        answer = front.ask(wire.GetPins(8))
        (pin,) = answer.pins
        assert (answer.call, pin.name, pin.num_tokens, pin.num_blocks) == (8, "system", 8, 2)
        for number in range(2, 12):  # other prompts, many times what the cache holds
            front.run(number, [number] * 30)
        assert front.run(20).cached_tokens == 8
        answer = front.ask(wire.Unpin(9, "system"))
        assert answer == wire.Pins(9, [], True)
        assert front.ask(wire.Unpin(10, "system")).found is False
        for number in range(30, 40):
            front.run(number, [number] * 30)
        assert front.run(50).cached_tokens == 0


def test_pins_over_the_cap_are_refused_with_the_cap() -> None:
    with Asking(kv={"max_tokens": 80}) as front:
        delta = front.run(1, [1] * 70, pin="large", max_tokens=1)
        assert delta.finish is not None and "may hold 10" in delta.error
        assert front.ask(wire.GetPins(1)).pins == []
        assert front.run(2, [2] * 70).finish == "length", "nothing is held"


def test_statistics_by_window() -> None:
    with Asking(kv={"iteration_stats_interval": 2}) as front:
        front.run(1)
        front.run(2)
        records = front.ask(wire.GetStats()).iterations
        entries = [record["kvCacheIterationStats"] for record in records if "kvCacheIterationStats" in record]
        assert 0 < len(entries) <= len(records) // 2
        (window,) = {key for entry in entries for key in entry}
        assert window == str(front.info.max_seq_len)
        assert sum(entry[window]["iterMissedBlocks"] for entry in entries) == 3 + 1
        totals = records[-1]["kvCacheStats"]
        assert totals["reusedTokens"] == 8 and totals["missedTokens"]["noPrefix"] == len(PROMPT)


@pytest.mark.parametrize(
    ("kv", "granularity", "line"),
    [
        ({}, 1, "on, from 1 shared token"),
        ({"enable_partial_reuse": False}, 4, "whole blocks of 4"),
        ({"enable_block_reuse": False}, 0, "block reuse: off"),
    ],
)
def test_the_start_tells_what_is_reused(
    kv: dict[str, Any], granularity: int, line: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO", logger="headrace"), Asking(kv=kv) as front:
        assert front.info.reuse == wire.ReuseInfo(granularity=granularity, event_buffer=100 if granularity else 0)
        assert front.info.reuse.is_on == (granularity > 0)
        assert line in caplog.text
        front.run(1)
        assert front.run(2).cached_tokens == (8 if granularity else 0)
