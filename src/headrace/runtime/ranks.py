"""Several ranks behind one engine port: a process a rank, the plan broadcast, the first rank's result returned."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from headrace.config.llm_args import LlmArgs
from headrace.hub.source import ModelSource
from headrace.runtime import codec
from headrace.runtime.children import end_children, start_child
from headrace.runtime.failure import ProcessEnd
from headrace.runtime.packing import pack_args, pack_source
from headrace.runtime.pulse import PERIOD_S, PulseWatch
from headrace.seam import EngineFacts, Ints, PoolSizes, StepPlan, StepResult, ints

Message = TypeVar("Message", codec.Opened, codec.Allocated, codec.Done)

POLL_S = 0.2
CLOSE_TIMEOUT_S = 4.0
BROKEN_CLOSE_TIMEOUT_S = 0.5
"""Of a group that has failed: those who wait for it are told after its end."""
DEATH_WAIT_S = 1.0
STUCK_FACTOR = 5.0
"""Of `stall_timeout_s`: a step may take so long while all ranks live. It may be a long one, or the first on a GPU."""
STACKS_WAIT_S = 0.3
"""For ranks to write where they are stuck."""


class RankFailed(ProcessEnd):
    """A rank is dead or cannot go on; the message names it."""


class RankGroup:
    """Tensor-parallel ranks on this machine. Implements `seam.EnginePort`.

    Every rank computes the same step on its share of the weights and samples the same tokens (noise is
    keyed by request and position), so only the first rank's tokens travel.
    """

    def __init__(self, args: LlmArgs, source: ModelSource, *, size: int, num_valid_ids: int | None) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-ranks-", ignore_cleanup_errors=True)
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._broken = False
        self._patience_s = max(args.stall_timeout_s, 2 * PERIOD_S)
        self._pulses = [Path(self._folder.name) / f"pulse-{rank}" for rank in range(size)]
        self._reports = ReportMerger(size)
        self._commands = CommandMerger(size)
        meeting = f"file://{self._folder.name}/meeting"
        for rank in range(size):
            address = f"ipc://{self._folder.name}/rank-{rank}"
            socket = self._context.socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            self._sockets.append(socket)
            order = RankOrder(
                args=pack_args(args),
                source=pack_source(source),
                rank=rank,
                size=size,
                init_method=meeting,
                address=address,
                num_valid_ids=num_valid_ids,
                pulse=str(self._pulses[rank]),
            )
            self._processes.append(start_child("headrace.runtime.rank", msgspec.json.encode(order)))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # ---- the port ----------------------------------------------------------------------------

    def open(self) -> EngineFacts:
        facts = [self._expect(rank, codec.Opened).facts for rank in range(self.size)]
        return _smallest(facts)

    def allocate(self, sizes: PoolSizes) -> None:
        self._broadcast(codec.Allocate(sizes))
        for rank in range(self.size):
            self._expect(rank, codec.Allocated)

    def submit(self, plan: StepPlan) -> None:
        self._broadcast(codec.Step(plan))

    def collect(self) -> StepResult:
        results = [self._expect(rank, codec.Done, bounded=True).result for rank in range(self.size)]
        finished, failed = self._reports.merge(results)
        return dataclasses.replace(
            results[0],
            finished_copies=finished,
            failed_copies=failed,
            finished_commands=self._commands.merge(results),
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        end_children(self._processes, timeout_s=BROKEN_CLOSE_TIMEOUT_S if self._broken else CLOSE_TIMEOUT_S)
        for socket in self._sockets:
            socket.close()
        self._context.term()
        self._folder.cleanup()

    # ---- messages ----------------------------------------------------------------------------

    def _broadcast(self, message: codec.ToRank) -> None:
        data = codec.encode(message)
        for rank in range(self.size):
            self._wait(rank, zmq.POLLOUT)  # a dead rank has no peer: sending would block for ever
            self._sockets[rank].send(data)

    def _wait(self, rank: int, event: int, *, bounded: bool = False) -> None:
        """Until the rank's socket is ready; watches all ranks, since any one that ends, or hangs, stops the others."""
        waited_s = 0.0
        watch = PulseWatch(self._pulses)
        while not self._sockets[rank].poll(int(POLL_S * 1000), event):
            for other in range(self.size):
                if not self._sockets[other].poll(0):
                    self._raise_if_dead(other)
            if bounded:
                waited_s += POLL_S
                watch.look(POLL_S)
                self._raise_if_hung(watch.silent(self._patience_s), waited_s)

    def _raise_if_hung(self, silent: list[int], waited_s: float) -> None:
        if silent:
            why = f"has given no sign of life for {self._patience_s:g} s: it is stopped or hangs"
            raise self._broken_by(f"{_named(silent)} {why}")
        limit_s = STUCK_FACTOR * self._patience_s
        if waited_s >= limit_s:
            late = [rank for rank, socket in enumerate(self._sockets) if not socket.poll(0)]
            for process in self._processes:
                process.send_signal(signal.SIGUSR1)  # each writes its stack to standard error
            time.sleep(STACKS_WAIT_S)
            raise self._broken_by(f"{_named(late)} made no step in {limit_s:g} s, though all ranks live")

    def _broken_by(self, message: str) -> RankFailed:
        self._broken = True
        return RankFailed(message)

    def _raise_if_dead(self, rank: int) -> None:
        code = self._processes[rank].poll()
        if code is not None:
            end = f"was killed by signal {-code}" if code < 0 else f"ended ({code})"
            raise self._broken_by(f"rank {rank} {end}")

    def _blame_the_dead(self, reporter: int) -> None:
        """What one rank reports may be another's death: name that one. Its sockets close before its process ends."""
        deadline_s = time.monotonic() + DEATH_WAIT_S
        while time.monotonic() < deadline_s:
            for other in range(self.size):
                if other != reporter and not self._sockets[other].poll(0):
                    self._raise_if_dead(other)
            time.sleep(0.02)

    def _expect(self, rank: int, kind: type[Message], *, bounded: bool = False) -> Message:
        """`bounded`: it is a step, which doesn't take for ever. Loading may."""
        self._wait(rank, zmq.POLLIN, bounded=bounded)
        message = codec.decode_from_rank(self._sockets[rank].recv())
        if isinstance(message, codec.Broken):
            self._blame_the_dead(rank)
            text = f"rank {rank}: {message.message}"
            raise ValueError(text) if message.bad_input else self._broken_by(text)
        assert isinstance(message, kind), message
        return message


class ReportMerger:
    """Copies and transfers end on each rank at a time of its own: for the control half when they have on all.

    Each rank holds a share of every block, so one that failed anywhere holds nothing.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[int, int] = {}
        """By id, the ranks that have reported it; those of all are gone."""
        self._failed: set[int] = set()

    def merge(self, results: Sequence[StepResult]) -> tuple[Ints, Ints]:
        """One step's results by rank. -> (ids that have ended on all ranks, those among them that failed on any)"""
        finished: list[int] = []
        failed: list[int] = []
        for result in results:
            self._failed.update(result.failed_copies.tolist())
            for copy_id in result.finished_copies.tolist():
                count = self._counts.pop(copy_id, 0) + 1
                if count < self._size:
                    self._counts[copy_id] = count
                    continue
                finished.append(copy_id)
                if copy_id in self._failed:
                    self._failed.remove(copy_id)
                    failed.append(copy_id)
        return ints(finished), ints(failed)


class CommandMerger:
    """A command has ended when it has on all ranks; what it brought is the first error, or the last rank's result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: dict[int, list[Any]] = {}

    def merge(self, results: Sequence[StepResult]) -> dict[int, Any]:
        """One step's results by rank. -> what has ended on all ranks"""
        finished: dict[int, Any] = {}
        for result in results:
            for command, brought in result.finished_commands.items():
                by_rank = self._results.setdefault(command, [])
                by_rank.append(brought)
                if len(by_rank) == self._size:
                    del self._results[command]
                    finished[command] = next((each for each in by_rank if each.get("error")), brought)
        return finished


class RankOrder(msgspec.Struct):
    """What a rank's process is told on its standard input."""

    args: dict[str, Any]
    source: dict[str, str | None]
    rank: int
    size: int
    init_method: str
    address: str
    num_valid_ids: int | None
    pulse: str
    """The file that it touches as long as it lives."""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _smallest(facts: Sequence[EngineFacts]) -> EngineFacts:
    """One rank's view for all: the memory of the fullest."""
    return dataclasses.replace(
        facts[0],
        weight_bytes=max(each.weight_bytes for each in facts),
        activation_bytes=max(each.activation_bytes for each in facts),
        graph_bytes=max(each.graph_bytes for each in facts),
        free_bytes=min(each.free_bytes for each in facts),
        copy_bytes_per_s=min(each.copy_bytes_per_s for each in facts),
    )
