"""The Python API over a real engine of a tiny random model, held to the rows of public failures.

The numbers are rows of the project's list of behaviours.

    12, 14, 16 seeds, n               test_llm.py (TestRealEngine)
    32 greedy beside random           test_greedy_rows_beside_random_ones
    38 batch equals one by one        test_two_calls_in_a_row
    41, 42, 44, 45 cancels            test_cancels_free_everything
    46, 47, 66 tiny pool, canaries    test_answers_are_nobody_elses
    48 a fault is one request's       test_a_fault_of_a_processor_is_its_requests_alone
    49 larger than the pool           test_larger_than_the_pool
    52 calls, threads, the end        test_two_calls_in_a_row, TestLife
    58, 67 what is reused is told     runtime/test_loop_cache.py, runtime/test_reuse.py, server/test_cache.py
    59 salts                          test_cache_salts, server/test_cache.py (of API keys), tests/kvcache
    60 keys of every tier             kvcache/test_events.py, kvcache/test_disk_index.py

Cannot apply yet: 61, 63 (adapters, images).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.front.errors import RuntimeFailure
from headrace.front.request_output import RequestOutput
from headrace.llm import LLM, RequestError, RequestFailed
from headrace.params import SamplingParams
from headrace.runtime import core
from headrace.runtime.core import Core

BLOCK = 4
ENDLESS = SamplingParams(max_tokens=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.twin.harness import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@contextmanager
def opened(folder: Path, *, max_kv_tokens: int = 1024, **args: Any) -> Iterator[tuple[LLM, Core]]:
    """An engine and, to look at, its inside."""
    cores: list[Core] = []
    original = core.open_core

    def remember(*given: Any) -> Core:
        cores.append(original(*given))
        return cores[-1]

    core.open_core = remember
    try:
        llm = LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            engine_threads=1,
            **{"max_batch_size": 16, **args},
            kv_cache_config={"tokens_per_block": BLOCK, "max_tokens": max_kv_tokens},
        )
    finally:
        core.open_core = original
    with llm:
        yield llm, cores[0]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with opened(folder) as (found, _):
        yield found


def ids_of(output: RequestOutput | list[RequestOutput]) -> list[int]:
    assert isinstance(output, RequestOutput)
    return output.outputs[0].token_ids


def until(is_there: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def assert_idle(inside: Core) -> None:
    """Nothing runs, and every block is free or cached."""
    assert until(lambda: not inside.scheduler.has_work)
    time.sleep(0.02)  # the step that freed the last of them ends
    inside.scheduler.check()
    for section in inside.scheduler.sections:
        stats = section.kv.stats
        assert stats.num_leased == (0,) * len(stats.num_leased)
        assert [f + c for f, c in zip(stats.num_free, stats.num_cached)] == list(stats.num_total)


def prompt_of(number: int, length: int = 6) -> list[int]:
    return [random.Random(number * 1000 + at).randrange(1, 95) for at in range(length)]


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_cancels_free_everything(folder: Path, policy: str) -> None:
    """300 requests of 32 clients at a time, most of them queued, ended at any moment."""
    draw = random.Random(7)
    scheduler = {"capacity_scheduler_policy": policy}

    async def client(llm: LLM, number: int, turn: asyncio.Semaphore) -> None:
        async with turn:
            params = SamplingParams(max_tokens=draw.randrange(1, 120), n=draw.choice([1, 1, 3]))
            output = llm.generate_async(prompt_of(number, draw.randrange(1, 80)), params,
                                        streaming=number % 2 == 0)  # fmt: skip
            how = number % 4
            if how == 0:
                async for _ in output:
                    if draw.random() < 0.2:
                        break
            else:
                await asyncio.sleep(draw.random() * 0.03)
            output.abort()
            await output.aresult()
            assert output.finished and output.outputs[0].finish_reason in ("cancelled", "length")

    async def run(llm: LLM) -> None:
        turn = asyncio.Semaphore(32)
        await asyncio.gather(*(client(llm, number, turn) for number in range(300)))

    with opened(folder, max_kv_tokens=256, scheduler_config=scheduler, max_batch_size=8) as (llm, inside):
        asyncio.run(run(llm))
        assert_idle(inside)
        assert len(ids_of(llm.generate(prompt_of(1, 100), SamplingParams(max_tokens=150)))) == 150  # the whole pool
        assert_idle(inside)


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_are_nobody_elses(folder: Path, llm: LLM, overlap: bool) -> None:
    """32 prompts in a pool that holds a few of them, with preemption, aborts and shared beginnings."""
    prompts = [prompt_of(number // 3, 9) + prompt_of(number, 4) for number in range(32)]
    params = SamplingParams(max_tokens=30)
    alone = [ids_of(llm.generate(prompt, params)) for prompt in prompts]
    draw = random.Random(3)
    with opened(
        folder,
        max_kv_tokens=160,
        max_num_tokens=48,
        disable_overlap_scheduler=not overlap,
        scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
    ) as (small, inside):
        for _ in range(2):
            outputs = [small.generate_async(prompt, params) for prompt in prompts]
            for number in draw.sample(range(32), 8):
                time.sleep(draw.random() * 0.01)
                outputs[number].abort()
            for output, expected in zip(outputs, alone):
                ids = ids_of(output.result(60))
                assert ids == expected[: len(ids)]
                assert len(ids) == 30 or output.aborted()
        assert_idle(inside)


def test_a_fault_of_a_processor_is_its_requests_alone(llm: LLM) -> None:
    def broken(request_id: int, logits: Any, tokens: list[list[int]], stream: Any, client: Any) -> None:
        if len(tokens[0]) > 9:
            raise ZeroDivisionError("my own fault")

    def rude(*_: Any) -> None:
        raise SystemExit("a processor may not end the engine")

    expected = ids_of(llm.generate(prompt_of(1), SamplingParams(max_tokens=12)))
    for processor, message in ((broken, "my own fault"), (rude, "SystemExit")):
        params = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, logits_processor=processor)]
        with pytest.raises(RequestFailed, match=message) as error:
            llm.generate([prompt_of(1), prompt_of(2)], params, use_tqdm=False)
        good, bad = error.value.outputs
        assert ids_of(good) == expected and good.error is None
        assert bad.error is not None and message in bad.error
    assert ids_of(llm.generate(prompt_of(1), SamplingParams(max_tokens=12))) == expected


def test_greedy_rows_beside_random_ones(llm: LLM) -> None:
    expected = ids_of(llm.generate(prompt_of(1), SamplingParams(max_tokens=10)))
    cold: list[dict[str, Any]] = [{"temperature": 1e-6}, {"top_k": 1, "temperature": 2.0}, {"top_p": 0.0},
                                  {"min_p": 1.0}, {"temperature": 1.0, "top_p": 1e-9}]  # fmt: skip
    warm = [{"temperature": 1e4}, {"temperature": 1e-4}, {"repetition_penalty": 1e30}, {"frequency_penalty": 1e38},
            {"logit_bias": {3: 1e38}}, {"top_k": 3, "top_p": 0.1, "min_p": 0.9}]  # fmt: skip
    outputs = llm.generate(
        [prompt_of(1)] * 11, [SamplingParams(max_tokens=10, **changes) for changes in (*cold, *warm)], use_tqdm=False
    )
    assert isinstance(outputs, list)
    assert [ids_of(output) for output in outputs[:5]] == [expected] * 5
    assert all(len(ids_of(output)) == 10 for output in outputs)


def test_larger_than_the_pool(folder: Path) -> None:
    with opened(folder, max_kv_tokens=64) as (llm, inside):
        with pytest.raises(RequestError, match="at most 63 prompt tokens fit"):
            llm.generate(prompt_of(1, 64))
        outputs = llm.generate([prompt_of(1, 40), prompt_of(2, 3)], SamplingParams(max_tokens=100), use_tqdm=False)
        assert isinstance(outputs, list)
        assert [len(ids_of(output)) for output in outputs] == [24, 61]
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        assert_idle(inside)


def test_cache_salts(folder: Path) -> None:
    with opened(folder) as (llm, _):
        for salt, cached in (("a", 0), ("a", 9), ("b", 0), (None, 0), ("a", 9)):
            output = llm.generate(prompt_of(1, 10), SamplingParams(max_tokens=1), cache_salt=salt)
            assert isinstance(output, RequestOutput) and output.cached_tokens == cached


def test_two_calls_in_a_row(llm: LLM) -> None:
    prompts = [prompt_of(number, 1 + number % 7) for number in range(40)]
    params = SamplingParams(max_tokens=5)
    rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    alone = [ids_of(llm.generate(prompt, params)) for prompt in prompts]
    for outputs in rounds:
        assert isinstance(outputs, list) and [ids_of(output) for output in outputs] == alone


class TestLife:
    def test_an_interrupt_leaves_a_working_engine(self, folder: Path) -> None:
        with opened(folder) as (llm, inside):
            timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                while True:
                    llm.generate([prompt_of(number) for number in range(30)], ENDLESS, use_tqdm=False)
            assert_idle(inside)
            assert len(ids_of(llm.generate(prompt_of(1), SamplingParams(max_tokens=3)))) == 3

    def test_it_ends_quickly_while_requests_run(self, folder: Path) -> None:
        before = set(threading.enumerate())
        with opened(folder) as (llm, _):
            outputs = [llm.generate_async(prompt_of(number), ENDLESS, streaming=True) for number in range(40)]
            next(iter(outputs[0]))
            started = time.monotonic()
            llm.shutdown()
            assert time.monotonic() - started < 5
            for output in outputs:
                with pytest.raises(RequestFailed, match="shut down"):
                    output.result(1)
        assert set(threading.enumerate()) <= before

    def test_an_error_in_its_block_ends_it(self, folder: Path) -> None:
        with pytest.raises(LookupError), opened(folder) as (llm, _):
            output = llm.generate_async(prompt_of(1), ENDLESS)
            raise LookupError
        assert output.done
        with pytest.raises(RuntimeFailure, match="make a new LLM"):
            llm.generate(prompt_of(1))

    def test_several_at_once_and_threads(self, folder: Path) -> None:
        found: dict[tuple[int, int], list[int]] = {}

        def use(place: int, llm: LLM) -> None:
            for number in range(5):
                found[place, number] = ids_of(llm.generate(prompt_of(number), SamplingParams(max_tokens=8)))

        with opened(folder) as (first, _), opened(folder) as (second, _):
            threads = [threading.Thread(target=use, args=(place, (first, second)[place % 2])) for place in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert len(found) == 30
        assert all(found[place, number] == found[0, number] for place, number in found)

    def test_a_waiter_that_is_cancelled_harms_nobody(self, llm: LLM) -> None:
        """Its event loop has ended when the answer comes."""
        output = llm.generate_async(prompt_of(1), ENDLESS)
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            asyncio.run(asyncio.wait_for(output.aresult(), 0.005))
        assert len(ids_of(output.result(30))) == 200
        assert len(ids_of(llm.generate(prompt_of(1), SamplingParams(max_tokens=3)))) == 3

    def test_a_forked_child_is_told(self, llm: LLM) -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                llm.generate_async(prompt_of(1))
            except RuntimeFailure as error:
                os.write(writer, str(error).encode())
            llm.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        assert b"make a new LLM here" in os.read(reader, 1000)
        assert len(ids_of(llm.generate(prompt_of(1), SamplingParams(max_tokens=3)))) == 3
