"""The loop over the instant and the fake engine, on a thread, as front ends see it."""

from __future__ import annotations

import dataclasses
import queue
import time
from pathlib import Path

import pytest

from headrace import wire
from headrace.config.llm_args import LlmArgs
from headrace.engine.fake import FakeEngine, reference
from headrace.engine.instant import InstantEngine
from headrace.hub.source import ModelSource
from headrace.runtime.launch import LocalRuntime
from headrace.seam import StepPlan, StepResult
from headrace.types import Grammar, Request, Sampling

SOURCE = ModelSource(kind="hf", path=Path("/nowhere"), name="fake")


def args(**changes: object) -> LlmArgs:
    kv = {"tokens_per_block": 4, "max_tokens": 400}
    return LlmArgs.model_validate({"model": "fake", "kv_cache_config": kv, "enable_iter_perf_stats": True, **changes})


def request(number: int, **changes: object) -> Request:
    fields = {"id": number, "prompt": [number, 2, 3], "sampling": Sampling(), "max_tokens": 6, **changes}
    return Request(arrival_s=time.monotonic(), **fields)  # type: ignore[arg-type]


class Front:
    """Starts a runtime and collects what it says."""

    def __init__(self, engine: object, **changes: object) -> None:
        self.messages: queue.Queue[wire.Down] = queue.Queue()
        self.runtime = LocalRuntime(args(**changes), SOURCE, self.messages.put, make_engine=lambda *_: engine)  # type: ignore[arg-type,return-value]
        self.runtime.start()

    def until_finished(self, number: int) -> list[int]:
        tokens: list[int] = []
        while True:
            message = self.messages.get(timeout=10)
            assert isinstance(message, wire.Outputs), message
            ids, plain = message.plain
            tokens += plain[ids == number].tolist()
            for delta in message.deltas:
                if delta.id == number:
                    tokens += delta.tokens
                    if delta.finish is not None:
                        return tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_arrive(overlap: bool) -> None:
    front = Front(FakeEngine(vocab_size=50), disable_overlap_scheduler=not overlap)
    ready = front.messages.get(timeout=10)
    assert isinstance(ready, wire.Ready) and ready.info.max_kv_tokens == 400
    front.runtime.send(wire.Submit([request(1)]))
    assert front.until_finished(1) == reference([1, 2, 3], 6, vocab_size=50)
    front.runtime.send(wire.GetStats())
    stats = front.messages.get(timeout=10)
    assert isinstance(stats, wire.Stats)
    assert sum(record["numCompletedRequests"] for record in stats.iterations) == 1
    assert stats.iterations[-1]["kvCacheStats"]["usedNumBlocks"] == 0
    front.runtime.close()
    front.runtime.close()


def test_an_abort_frees_everything_when_the_engine_is_idle() -> None:
    front = Front(FakeEngine(vocab_size=50))
    front.messages.get(timeout=10)
    front.runtime.send(wire.Submit([request(1, max_tokens=10_000)]))
    front.runtime.send(wire.Abort([1]))
    while True:
        message = front.messages.get(timeout=10)
        assert isinstance(message, wire.Outputs)
        if any(delta.finish == "abort" for delta in message.deltas):
            break
    front.runtime.send(wire.Submit([request(2)]))
    front.until_finished(2)
    front.runtime.send(wire.GetStats())
    stats = front.messages.get(timeout=10)
    assert isinstance(stats, wire.Stats) and stats.iterations[-1]["numActiveRequests"] == 0
    front.runtime.close()


class Breaking(InstantEngine):
    def collect(self) -> StepResult:
        raise RuntimeError("the card fell out")


class Unreadable(InstantEngine):
    def open(self):  # type: ignore[no-untyped-def]
        raise ValueError("config.json: is not JSON")


def test_a_broken_engine_is_told() -> None:
    front = Front(Breaking())
    front.messages.get(timeout=10)
    front.runtime.send(wire.Submit([request(1)]))
    failed = front.messages.get(timeout=10)
    assert isinstance(failed, wire.Failed)
    assert failed.message == "RuntimeError: the card fell out" and not failed.bad_input
    assert "collect" in failed.traceback
    front.runtime.close()


def test_bad_input_is_told_as_such() -> None:
    front = Front(Unreadable())
    failed = front.messages.get(timeout=10)
    assert failed == wire.Failed("config.json: is not JSON", failed.traceback, bad_input=True)  # type: ignore[union-attr]


class SlowCompiler(InstantEngine):
    """Compiles a grammar in 0.3 s, beside the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_empty = 0
        self._open: dict[int, float] = {}

    def submit(self, plan: StepPlan) -> None:
        self.num_empty += not plan.num_rows
        self._open |= {command.id: time.monotonic() + 0.3 for command in plan.commands}
        super().submit(dataclasses.replace(plan, commands=()))

    def collect(self) -> StepResult:
        done = {command: {"error": ""} for command, end_s in self._open.items() if end_s <= time.monotonic()}
        self._open = {command: end_s for command, end_s in self._open.items() if command not in done}
        return dataclasses.replace(super().collect(), finished_commands=done)


def test_a_wait_for_a_grammar_takes_few_empty_plans() -> None:
    engine = SlowCompiler()
    front = Front(engine)
    assert isinstance(front.messages.get(timeout=60), wire.Ready)
    front.runtime.send(wire.Submit([request(1, grammar=Grammar(kind="regex", spec="a*"))]))
    assert len(front.until_finished(1)) == 6
    assert 1 < engine.num_empty <= 60, "ten of a millisecond, then each after a tenth more of the time"
    front.runtime.close()
