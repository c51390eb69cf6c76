"""Driving a runtime with tasks over wire messages, and noting when each token arrives."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace import wire
from headrace.bench.record import Record
from headrace.bench.workload import Task
from headrace.log import get
from headrace.types import Request, Sampling

__all__ = ["Driver", "OpenRuntime", "Progress", "Runtime", "check_tasks"]

POLL_S = 0.2
STATS_TIMEOUT_S = 60.0

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
    for task in tasks:
        num_prompt, num_total = len(task.prompt), len(task.prompt) + task.num_output
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
    """Tasks on their way through the runtime. `start` is called by one thread, `take` by the runtime's."""

    def __init__(
        self,
        tasks: Sequence[Task],
        send: Callable[[wire.Up], None],
        *,
        first_id: int,
        concurrency: int,
        stop_ids: tuple[int, ...],
        cache_salt: str,
    ) -> None:
        self.tasks = tasks
        self.done = threading.Event()
        self.num_tokens = 0
        self.start_s = [0.0] * len(tasks)
        self.outputs: list[tuple[float, wire.Outputs]] = []
        self._send = send
        self._first_id = first_id
        self._concurrency = concurrency
        self._stop_ids = stop_ids
        self._cache_salt = cache_salt
        self._num_sent = 0
        self._num_ended = 0

    def start(self) -> None:
        self._submit(min(self._concurrency, len(self.tasks)))

    def take(self, outputs: wire.Outputs, now_s: float) -> None:
        self.outputs.append((now_s, outputs))
        self.num_tokens += len(outputs.tokens) // 4 + sum(len(delta.tokens) for delta in outputs.deltas)
        num_ended = sum(delta.finish is not None for delta in outputs.deltas)
        self._num_ended += num_ended
        if self._num_ended == len(self.tasks):
            self.done.set()
        elif num_ended and self._num_sent < len(self.tasks):
            self._submit(min(num_ended, len(self.tasks) - self._num_sent))

    def record(self, *, steps_before: int) -> Record:
        return Record.of(self.tasks, self.start_s, self.outputs, first_id=self._first_id, steps_before=steps_before)

    def _submit(self, count: int) -> None:
        """The next tasks, together in one message."""
        now_s = time.monotonic()
        numbers = range(self._num_sent, self._num_sent + count)
        self._num_sent += count
        for number in numbers:
            self.start_s[number] = now_s
        self._send(wire.Submit([self._request(number, now_s) for number in numbers]))

    def _request(self, number: int, now_s: float) -> Request:
        task = self.tasks[number]
        return Request(
            id=self._first_id + number,
            prompt=list(task.prompt),
            sampling=Sampling(),
            max_tokens=task.num_output,
            stop_ids=self._stop_ids,
            arrival_s=now_s,
            cache_salt=self._cache_salt,
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
        concurrency: int | None = None,
        stop_ids: tuple[int, ...] = (),
        cache_salt: str = "",
        progress: Progress | None = None,
    ) -> Record:
        """Greedy generation of every task; returns when the last one has ended.

        Args:
            concurrency: most requests handed over and not yet ended; None hands all over at once, in one message.
            stop_ids: tokens that end a request early; none means that every request runs to its length.
            cache_salt: runs with different salts share no cached prefix.

        Raises:
            RuntimeError: the runtime has ended.
        """
        batch = Batch(
            tasks,
            self._runtime.send,
            first_id=self._next_id,
            concurrency=concurrency or len(tasks),
            stop_ids=stop_ids,
            cache_salt=cache_salt,
        )
        self._next_id += len(tasks)
        steps_before = self._steps
        self._batch = batch
        num_shown = 0
        batch.start()
        while not batch.done.wait(POLL_S):
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
