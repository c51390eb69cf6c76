"""One rank behind the engine port: a worker thread that runs the plans in order.

`submit` hands a plan to the worker and returns; `collect` waits for the oldest result. All device
work, loading included, begins on the worker, so there is one thread with one OpenMP team (on a CPU)
or one current stream (on a GPU). The worker doesn't wait for a GPU: it queues the next plan behind the last.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from headrace.config.llm_args import LlmArgs
from headrace.engine.compiling import OpenCompiler
from headrace.engine.rank import Rank
from headrace.hub.source import ModelSource
from headrace.kernels import _native
from headrace.layers.parallel import Gloo, ParallelContext
from headrace.seam import EngineFacts, PoolSizes, StepPlan, StepResult

T = TypeVar("T")

log = logging.getLogger("headrace.engine")

CLOSE_TIMEOUT_S = 4.0


def use_threads(count: int) -> None:
    """Threads of the CPU's work: the compiled kernels' own pool, or torch's where there are no kernels.

    Never both. OpenMP ends a region only when every thread has been there, so with a core busy elsewhere each
    of a step's hundreds of small regions would wait for a slice of the scheduler; the kernels' pool does not.

    More threads than CPUs only wait for one another: they are cut to that, with a warning.
    """
    most = len(os.sched_getaffinity(0))
    if count > most:
        log.warning(
            "engine_threads: %d is more than the %d CPUs that this process may use: %d are used", count, most, most
        )
        count = most
    if _native.library() is None:
        torch.set_num_threads(count)
    else:
        _native.set_num_threads(count)
        torch.set_num_threads(1)


class Engine:
    """Implements `seam.EnginePort` for one rank."""

    def __init__(
        self,
        args: LlmArgs,
        source: ModelSource,
        *,
        num_valid_ids: int | None = None,
        open_compiler: OpenCompiler | None = None,
        rank: int = 0,
        size: int = 1,
        init_method: str = "",
    ) -> None:
        """
        Args:
            num_valid_ids: size of the tokenizer, when the embedding has padded rows beyond it.
            open_compiler: makes what compiles grammars; None without a tokenizer.
            init_method: where tensor-parallel ranks meet (torch.distributed), for size > 1.
        """
        self.args = args
        self.source = source
        self._num_valid_ids = num_valid_ids
        self._open_compiler = open_compiler
        self._place = (rank, size)
        self._init_method = init_method
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Callable[[], StepResult] | BaseException] = queue.SimpleQueue()
        self._rank: Rank | None = None
        self._worker = threading.Thread(target=self._work, name=f"headrace-engine-{rank}", daemon=True)
        self._worker.start()

    # ---- the port ----------------------------------------------------------------------------

    def open(self) -> EngineFacts:
        def load() -> EngineFacts:
            use_threads(self.args.engine_threads or len(os.sched_getaffinity(0)))
            self._rank = Rank(
                self.args,
                self.source,
                self._parallel(),
                num_valid_ids=self._num_valid_ids,
                open_compiler=self._open_compiler,
            )
            return self._rank.facts

        return self._call(load)

    def allocate(self, sizes: PoolSizes) -> None:
        assert self._rank is not None, "open comes first"
        loaded = self._rank
        self._call(lambda: loaded.allocate(sizes))

    def submit(self, plan: StepPlan) -> None:
        loaded = self._rank
        assert loaded is not None, "open comes first"

        def step() -> None:
            try:
                self._results.put(loaded.queue(plan))
            except BaseException as error:  # handed to whoever collects
                self._results.put(error)

        self._jobs.put(step)

    def collect(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result()

    def close(self) -> None:
        self._jobs.put(None)
        self._worker.join(CLOSE_TIMEOUT_S)
        if self._rank is not None:
            self._rank.close()
            self._rank = None

    # ---- the worker --------------------------------------------------------------------------

    def _parallel(self) -> ParallelContext:
        rank, size = self._place
        if size == 1:
            return ParallelContext()
        return ParallelContext(rank, size, Gloo(rank, size, init_method=self._init_method))

    def _call(self, function: Callable[[], T]) -> T:
        """Run on the worker and wait."""
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def job() -> None:
            try:
                answer.put((function(), None))
            except BaseException as error:  # handed to the caller
                answer.put((None, error))

        self._jobs.put(job)
        value, error = answer.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _work(self) -> None:
        before = torch.get_num_threads()
        while (job := self._jobs.get()) is not None:
            job()
        # The process is not ours: its setting is as it was.
        torch.set_num_threads(before)
        _native.set_num_threads(None)
