"""Driving a runtime with tasks over wire messages, and noting when each token arrives."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace import wire
from headrace.bench.pace import Closed, Pace, Turns
from headrace.bench.record import Record
from headrace.bench.workload import Task, full_lengths
from headrace.log import get
from headrace.types import Request

__all__ = ["Driver", "OpenRuntime", "Progress", "Runtime", "check_tasks"]

POLL_S = 0.2
STATS_TIMEOUT_S = 60.0
ALL_AT_ONCE = Closed()

log = get("bench")


class Runtime(Protocol):
    """What `runtime.launch.LocalRuntime` offers."""

    def start(self) -> None: ...

    def send(self, message: wire.Up) -> None: ...

    def close(self) -> None: ...


OpenRuntime = Callable[[Callable[[wire.Down], None]], Runtime]
Progress = Callable[[int], object]
"""Called now and then with the number of new tokens since the last call."""


def check_tasks(tasks: Sequence[Task], info: wire.ModelInfo) -> None:
    """What could only fail must not be measured.

    Raises:
        ValueError: naming the request and the setting in its way.
    """
    for task, num_prompt in zip(tasks, full_lengths(tasks)):
        num_total = num_prompt + task.num_output
        what = f"request {task.task_id} of the dataset"
        size = f"{num_total} tokens ({num_prompt} in, {task.num_output} out)"
        if num_total > info.max_seq_len:
            raise ValueError(f"{what} needs {size} and max_seq_len is {info.max_seq_len}: use shorter requests")
        if num_total - 1 > info.max_kv_tokens:
            raise ValueError(
                f"{what} needs {size} and the KV cache holds {info.max_kv_tokens}: use shorter requests,"
                " or raise kv_cache_config.max_tokens or free_gpu_memory_fraction"
            )
        if num_prompt > info.max_num_tokens and not info.enable_chunked_prefill:
            raise ValueError(
                f"{what} has {num_prompt} prompt tokens and a step takes {info.max_num_tokens} without chunked"
                " prefill: set --enable_chunked_prefill or raise --max_num_tokens"
            )
        highest = max(task.prompt)
        if highest >= info.num_valid_ids:
            raise ValueError(f"{what} has the token id {highest}: this model's ids are 0 to {info.num_valid_ids - 1}")


class Batch:
    """Tasks on their way through the runtime. `take` is called by the runtime's thread, all else by the driver's.

    In a closed loop the runtime's thread hands over what comes next; in an open one the driver's does, by the clock.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        send: Callable[[wire.Up], None],
        *,
        first_id: int,
        pace: Pace,
        stop_ids: tuple[int, ...],
        cache_salt: str,
    ) -> None:
        self.done = threading.Event()
        self.num_tokens = 0
        self.start_s = [0.0] * len(tasks)
        self.outputs: list[tuple[float, wire.Outputs]] = []
        self._turns = Turns(tasks, pace)
        self._send = send
        self._first_id = first_id
        self._stop_ids = stop_ids
        self._cache_salt = cache_salt
        self._num_ended = 0
        self._lock = threading.Lock()

    def hand_over(self) -> float | None:
        """Send what is due; when the next request is, on the monotonic clock, or None if it waits for others."""
        now_s = time.monotonic()
        with self._lock:
            due = self._turns.due(now_s)
            for number, due_s in due:
                self.start_s[number] = due_s
            next_s = self._turns.next_s
        if due:
            self._send(wire.Submit([self._request(number, due_s) for number, due_s in due]))
        return next_s

    def take(self, outputs: wire.Outputs, now_s: float) -> None:
        self.outputs.append((now_s, outputs))
        self.num_tokens += len(outputs.tokens) // 4 + sum(len(delta.tokens) for delta in outputs.deltas)
        with self._lock:
            if self._turns.has_later_turns:
                self._keep_answers(outputs)
            ended = [delta.id - self._first_id for delta in outputs.deltas if delta.finish is not None]
            for number in ended:
                self._turns.end(number, now_s)
        self._num_ended += len(ended)
        if self._num_ended == len(self._turns.tasks):
            self.done.set()
        elif ended:
            self.hand_over()

    def record(self, *, steps_before: int) -> Record:
        tasks = self._turns.tasks
        return Record.of(tasks, self.start_s, self.outputs, first_id=self._first_id, steps_before=steps_before)

    def _keep_answers(self, outputs: wire.Outputs) -> None:
        ids, tokens = outputs.plain
        for request_id, token in zip(ids.tolist(), tokens.tolist()):
            self._turns.keep(request_id - self._first_id, [token])
        for delta in outputs.deltas:
            self._turns.keep(delta.id - self._first_id, delta.tokens)

    def _request(self, number: int, due_s: float) -> Request:
        task = self._turns.tasks[number]
        return task.request(
            self._first_id + number,
            arrival_s=due_s,
            cache_salt=self._cache_salt,
            stop_ids=self._stop_ids,
            label=f"bench-{task.task_id}",
        )


class Driver:
    """Owns a runtime for its life. A context manager; entering waits for the model."""

    def __init__(self, open_runtime: OpenRuntime) -> None:
        self._control: queue.SimpleQueue[wire.Ready | wire.Failed | wire.Stats] = queue.SimpleQueue()
        self._runtime = open_runtime(self._receive)
        self._batch: Batch | None = None
        self._failure: wire.Failed | None = None
        self._next_id = 0
        self._steps = 0

    def __enter__(self) -> wire.ModelInfo:
        """Start and wait. Ctrl-C gets through.

        Raises:
            ValueError: bad input.
            RuntimeError: the machine or the program is at fault.
        """
        try:
            self._runtime.start()
            message = self._answer(timeout_s=None)
            assert isinstance(message, wire.Ready)
            return message.info
        except BaseException:
            self._runtime.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._runtime.close()

    def run(
        self,
        tasks: Sequence[Task],
        *,
        pace: Pace = ALL_AT_ONCE,
        stop_ids: tuple[int, ...] = (),
        cache_salt: str = "",
        progress: Progress | None = None,
    ) -> Record:
        """Greedy generation of every task; returns when the last one has ended.

        Args:
            pace: when each request is handed over; the default hands all over at once, in one message.
            stop_ids: tokens that end a request early; none means that every request runs to its length.
            cache_salt: runs with different salts share no cached prefix.

        Raises:
            RuntimeError: the runtime has ended.
        """
        batch = Batch(
            tasks,
            self._runtime.send,
            first_id=self._next_id,
            pace=pace,
            stop_ids=stop_ids,
            cache_salt=cache_salt,
        )
        self._next_id += len(tasks)
        steps_before = self._steps
        self._batch = batch
        num_shown = 0
        next_s = batch.hand_over()
        while not batch.done.wait(POLL_S if next_s is None else min(max(next_s - time.monotonic(), 0), POLL_S)):
            if pace.is_open:
                next_s = batch.hand_over()
            if progress is not None:
                num_now = batch.num_tokens
                progress(num_now - num_shown)
                num_shown = num_now
            self._raise_failure()
        if progress is not None:
            progress(batch.num_tokens - num_shown)
        return batch.record(steps_before=steps_before)

    def iterations(self) -> list[dict[str, Any]]:
        """Statistics of the steps since the last call, where `enable_iter_perf_stats` is on."""
        self._runtime.send(wire.GetStats())
        message = self._answer(timeout_s=STATS_TIMEOUT_S)
        assert isinstance(message, wire.Stats)
        return message.iterations

    def _receive(self, message: wire.Down) -> None:
        """On the runtime's thread: as little as possible."""
        if isinstance(message, wire.Outputs):
            self._steps = message.step
            if self._batch is not None:
                self._batch.take(message, time.monotonic())
            return
        if isinstance(message, wire.Failed):
            self._failure = message
        if isinstance(message, wire.Ready | wire.Failed | wire.Stats):
            self._control.put(message)

    def _answer(self, *, timeout_s: float | None) -> wire.Ready | wire.Stats:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline_s is None or time.monotonic() < deadline_s:
            try:
                message = self._control.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if not isinstance(message, wire.Failed):
                return message
            self._raise_failure()
        raise RuntimeError("the runtime doesn't answer: run again with --log_level debug")

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            log.debug("%s", failure.traceback)
            raise (ValueError if failure.bad_input else RuntimeError)(failure.message)
