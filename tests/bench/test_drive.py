from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import wire
from headrace.bench.drive import Driver, check_tasks
from headrace.bench.pace import Closed, Open
from headrace.bench.workload import Task
from headrace.config.llm_args import LlmArgs
from headrace.engine.instant import InstantEngine
from headrace.hub.source import ModelSource
from headrace.runtime.launch import LocalRuntime
from headrace.types import Request
from headrace.wire import ModelInfo

INFO = ModelInfo(
    model="m", model_type="instant", vocab_size=100, num_valid_ids=90, max_seq_len=50, max_num_tokens=20,
    max_batch_size=8, max_beam_width=1, enable_chunked_prefill=True, kv_num_blocks=4, tokens_per_block=8,
)  # fmt: skip


class Watched:
    """A real runtime over the engine that answers at once; keeps what was sent and how much was ever in flight."""

    def __init__(self, on_message: Callable[[wire.Down], None], **settings: Any) -> None:
        self.sent: list[list[Request]] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._on_message = on_message
        fields = {"model": "m", "max_batch_size": 8, "kv_cache_config": {"max_tokens": 4096}, **settings}
        args = LlmArgs.model_validate(fields)
        source = ModelSource("hf", Path("/nowhere"), "m")
        self._runtime = LocalRuntime(args, source, self._watch, make_engine=lambda *_: InstantEngine(vocab_size=100))

    def _watch(self, message: wire.Down) -> None:
        if isinstance(message, wire.Outputs):
            self._in_flight -= sum(delta.finish is not None for delta in message.deltas)
        self._on_message(message)

    def start(self) -> None:
        self._runtime.start()

    def send(self, message: wire.Up) -> None:
        if isinstance(message, wire.Submit):
            self.sent.append(message.requests)
            self._in_flight += len(message.requests)
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self._runtime.send(message)

    def close(self) -> None:
        self._runtime.close()


def watched(**settings: Any) -> tuple[Driver, list[Watched]]:
    made: list[Watched] = []

    def open_runtime(on_message: Callable[[wire.Down], None]) -> Watched:
        made.append(Watched(on_message, **settings))
        return made[0]

    return Driver(open_runtime), made


TASKS = [Task(number, [number + 1] * (number % 5 + 1), number % 7 + 1) for number in range(20)]


def test_all_at_once_is_one_message() -> None:
    driver, (runtime,) = watched()
    shown: list[int] = []
    with driver as info:
        assert info.vocab_size == 100
        record = driver.run(TASKS, progress=shown.append, stop_ids=(7,), cache_salt="s")
    assert [len(requests) for requests in runtime.sent] == [20]
    first = runtime.sent[0][3]
    assert (first.prompt, first.max_tokens, first.stop_ids, first.cache_salt) == ([4] * 4, 4, (7,), "s")
    assert record.num_output.tolist() == [task.num_output for task in TASKS]
    assert sum(shown) == sum(task.num_output for task in TASKS)
    assert record.errors() == [] and len(set(record.start_s.tolist())) == 1
    assert (record.e2e_s() > 0).all() and (record.first_s >= record.start_s).all()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_is_kept(concurrency: int) -> None:
    driver, (runtime,) = watched()
    with driver:
        record = driver.run(TASKS, pace=Closed(concurrency))
    assert runtime.most_in_flight == concurrency
    assert [request.label for requests in runtime.sent for request in requests] == [f"bench-{i}" for i in range(20)]
    assert record.num_output.tolist() == [task.num_output for task in TASKS]
    assert (record.start_s[concurrency:] > record.start_s[0]).all()


def test_several_runs_count_their_own_steps_and_tokens() -> None:
    driver, _ = watched()
    with driver:
        for cached in ([0, 0], [2, 0], [2, 0]):  # all but the last token of a prompt that was there before
            record = driver.run([Task(0, [1, 2, 3], 5), Task(1, [4], 2)])
            assert record.num_output.tolist() == [5, 2]
            assert record.num_steps == 5
            assert record.num_cached().tolist() == cached


def test_a_run_with_another_salt_finds_nothing_in_the_cache() -> None:
    driver, _ = watched()
    prompt = [Task(0, list(range(90)), 2)]
    with driver:
        cached = [int(driver.run(prompt, cache_salt=salt).num_cached()[0]) for salt in ("warm-up", "", "")]
    assert cached == [0, 0, 89]


def test_statistics_of_steps() -> None:
    driver, _ = watched(enable_iter_perf_stats=True, iter_stats_max_iterations=-1)
    with driver:
        driver.run(TASKS)
        driver.iterations()
        record = driver.run([Task(0, [1, 2, 3], 5)])
        assert len(driver.iterations()) == record.num_steps == 5


class Dying:
    """A runtime that ends, at the start or with the first request."""

    def __init__(self, on_message: Callable[[wire.Down], None], failure: wire.Failed, *, at_start: bool) -> None:
        self.closed = 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def live() -> None:
            if not at_start:
                on_message(wire.Ready(INFO))
                self._inbox.get()
            on_message(failure)

        self._thread = threading.Thread(target=live)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: wire.Up) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        self.closed += 1
        self._thread.join(5)


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize(("bad_input", "error"), [(True, ValueError), (False, RuntimeError)])
def test_a_runtime_that_fails_is_closed_and_its_reason_raised(
    at_start: bool, bad_input: bool, error: type[Exception]
) -> None:
    made: list[Dying] = []

    def open_runtime(on_message: Callable[[wire.Down], None]) -> Dying:
        made.append(Dying(on_message, wire.Failed("no room", bad_input=bad_input), at_start=at_start))
        return made[0]

    driver = Driver(open_runtime)
    with pytest.raises(error, match="no room"), driver:
        assert not at_start, "a runtime that failed was taken for a ready one"
        driver.run(TASKS)
    assert made[0].closed == 1


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            Task(3, [1] * 40, 11),
            {},
            r"request 3 of the dataset needs 51 tokens \(40 in, 11 out\) and max_seq_len is 50",
        ),
        (Task(3, [1] * 30, 4), {}, "needs 34 tokens .* the KV cache holds 32"),
        (Task(3, [1] * 21, 1), {"enable_chunked_prefill": False}, "has 21 prompt tokens and a step takes 20"),
        (Task(3, [1, 90], 1), {}, "has the token id 90: this model's ids are 0 to 89"),
    ],
)
def test_what_can_only_fail_is_refused_first(task: Task, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tasks([Task(0, [1], 1), task], msgspec.structs.replace(INFO, **changes))


def test_what_just_fits_is_taken() -> None:
    check_tasks([Task(0, [1] * 30, 3), Task(1, [89] * 20, 1)], INFO)
    check_tasks([Task(0, [1] * 20, 3)], msgspec.structs.replace(INFO, enable_chunked_prefill=False))


def test_arrivals_by_the_clock_don_t_wait_for_answers() -> None:
    driver, (runtime,) = watched()
    arrivals = [0.0, 0.01, 0.01, 0.05]
    with driver:
        record = driver.run(TASKS[:4], pace=Open(arrivals))
    assert [len(requests) for requests in runtime.sent] != [4]
    assert (record.start_s - record.start_s[0]).tolist() == pytest.approx(arrivals)  # when due, not when sent
    assert record.num_output.tolist() == [task.num_output for task in TASKS[:4]]


@pytest.mark.parametrize("pace", [Closed(1), Closed(), Open([0.0, 0.0, 0.0, 0.01])])
def test_a_later_turn_is_asked_behind_the_answer_before_it(pace: Closed | Open) -> None:
    turns = [Task(0, [1, 2], 3), Task(0, [3], 2, after=0), Task(0, [4], 1, after=1), Task(1, [9], 2)]
    driver, (runtime,) = watched()
    with driver:
        record = driver.run(turns, pace=pace)
    first, second, third, other = (list(task.prompt) for task in record.tasks)
    answers = record.output_ids()
    assert second == first + answers[0] + [3] and third == second + answers[1] + [4] and other == [9]
    asked = {
        request.label: request.prompt for requests in runtime.sent for request in requests if len(request.prompt) > 2
    }
    assert third in asked.values()
    assert record.num_output.tolist() == [3, 2, 1, 2]
    assert record.start_s[1] >= record.end_s[0]
    if pace == Closed(1):  # a conversation goes on before the next one begins
        assert record.start_s[3] >= record.end_s[2]
    with pytest.raises(ValueError, match="needs 51 tokens"):
        check_tasks([Task(0, [1] * 15, 10), Task(0, [1] * 25, 1, after=0)], INFO)
