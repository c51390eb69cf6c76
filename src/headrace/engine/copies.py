"""Blocks on their way between device and host: a plan's copies in order, transfers beside the steps.

On CUDA nothing here waits for the device. Copies within the device run on the current stream, those to and from the
host on a stream of their own, and each waits for what came before it in the plan and in earlier ones; what the current
stream computes next waits for all of them. On a CPU copies are done when `copy` returns.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.engine.host_tier import HostTier
from headrace.engine.pools import copy_rows, row_index
from headrace.engine.workers import Workers
from headrace.seam import DEVICE, Ints

PROBE_BYTES = 16 << 20
NUM_PROBES = 4

Rows = list[int]


@dataclass(slots=True)
class CopyBatch:
    """Copies between two tiers of a group: no source is the destination of an earlier one, destinations differ."""

    group: int
    source_tier: int
    destination_tier: int
    sources: Rows = field(default_factory=list[int])
    destinations: Rows = field(default_factory=list[int])

    @property
    def is_local(self) -> bool:
        return self.source_tier == self.destination_tier


def batch_copies(copies: Ints) -> list[CopyBatch]:
    """Few batches that do the same as the copies one after another.

    Within a batch all sources may be read before a destination is written. A copy joins the first batch of its kind
    that comes after all it depends on.
    """
    batches: list[CopyBatch] = []
    of_kind: dict[tuple[int, int, int], list[int]] = {}
    last_read: dict[tuple[int, int, int], int] = {}
    last_write: dict[tuple[int, int, int], int] = {}
    for _, group, source_tier, source, tier, destination in copies.tolist():
        read, written = (source_tier, group, source), (tier, group, destination)
        first = max(last_write.get(read, -1) + 1, last_write.get(written, -1) + 1, last_read.get(written, 0))
        same = of_kind.setdefault((group, source_tier, tier), [])
        place = bisect_left(same, first)
        if place == len(same):
            same.append(len(batches))
            batches.append(CopyBatch(group, source_tier, tier))
        at = same[place]
        batches[at].sources.append(source)
        batches[at].destinations.append(destination)
        last_read[read] = max(last_read.get(read, 0), at)
        last_write[written] = at
    return batches


def runs(sources: Rows, destinations: Rows, *, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(source, destination, count) where both follow each other; `chunk` is what no run may cross on either side."""
    begin = 0
    for at in range(1, len(sources) + 1):
        if (
            at == len(sources)
            or sources[at] != sources[at - 1] + 1
            or destinations[at] != destinations[at - 1] + 1
            or sources[at] % chunk == 0
            or destinations[at] % chunk == 0
        ):
            yield sources[begin], destinations[begin], at - begin
            begin = at


class Mover(Protocol):
    """How blocks move between device and host."""

    def copy(self, copies: Ints) -> None:
        """A plan's copies [n, 6]: ordered after what was computed, and before what will be."""
        ...

    def send_down(self, transfers: Ints) -> None:
        """Begin transfers [n, 7] from device to host; nobody else touches their blocks."""
        ...

    def take_done(self) -> list[tuple[int, bool]]:
        """(id, whether it worked) of what is done since the last call; doesn't wait."""
        ...

    def close(self) -> None: ...


def make_mover(arenas: Sequence[Tensor], host: HostTier, device: torch.device) -> Mover:
    """
    Args:
        arenas: by group, uint8 [blocks, bytes] on the device.
    """
    return CudaMover(arenas, host, device) if device.type == "cuda" else CpuMover(arenas, host)


class CpuMover:
    """Both tiers are main memory. NumPy copies, since torch would start threads of its own for each thread here."""

    def __init__(self, arenas: Sequence[Tensor], host: HostTier) -> None:
        self._tiers = ([arena.numpy() for arena in arenas], host.arrays)
        self._workers = Workers(1, name="headrace-kv-down")
        self._done: list[tuple[int, bool]] = []

    def copy(self, copies: Ints) -> None:
        for _, group, source_tier, source, tier, destination in copies.tolist():
            self._tiers[tier][group][destination] = self._tiers[source_tier][group][source]
        self._done += [(copy_id, True) for copy_id in copies[:, 0].tolist()]

    def send_down(self, transfers: Ints) -> None:
        for copy_id, group, source_tier, source, tier, destination, _ in transfers.tolist():
            source_row = self._tiers[source_tier][group][source]
            self._workers.begin(copy_id, _copy_row(source_row, self._tiers[tier][group][destination]))

    def take_done(self) -> list[tuple[int, bool]]:
        done, self._done = self._done, []
        return done + self._workers.take_done()

    def close(self) -> None:
        self._workers.close()


def _copy_row(source: np.ndarray, destination: np.ndarray) -> Callable[[], bool]:
    def job() -> bool:
        np.copyto(destination, source)
        return True

    return job


class CudaMover:
    """Copy engines move what crosses the bus, one call a run of neighbouring blocks; kernels what stays inside."""

    def __init__(self, arenas: Sequence[Tensor], host: HostTier, device: torch.device) -> None:
        self._arenas = arenas
        self._host = host
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._transfers = torch.cuda.Stream(device)
        self._pending: list[tuple[torch.cuda.Event, list[int]]] = []

    def copy(self, copies: Ints) -> None:
        compute = torch.cuda.current_stream(self._device)
        for batch in batch_copies(copies):
            if batch.is_local:
                arena = self._arenas[batch.group]
                sources, destinations = (row_index(ids, self._device) for ids in (batch.sources, batch.destinations))
                copy_rows(arena, sources, arena, destinations)
                continue
            self._copies.wait_stream(compute)
            with torch.cuda.stream(self._copies):
                self._cross(batch)
            compute.wait_stream(self._copies)
        self._mark(compute, copies)

    def send_down(self, transfers: Ints) -> None:
        self._transfers.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._transfers):
            for batch in batch_copies(transfers[:, :6]):
                self._cross(batch)
        self._mark(self._transfers, transfers)

    def take_done(self) -> list[tuple[int, bool]]:
        done: list[tuple[int, bool]] = []
        pending, self._pending = self._pending, []
        for event, ids in pending:
            if event.query():
                done += [(copy_id, True) for copy_id in ids]
            else:
                self._pending.append((event, ids))
        return done

    def close(self) -> None:
        """What is on its way arrives before the memory goes."""
        self._copies.synchronize()
        self._transfers.synchronize()

    def _mark(self, stream: torch.cuda.Stream, moves: Ints) -> None:
        """They are done when the stream has come so far."""
        event = torch.cuda.Event()
        event.record(stream)
        self._pending.append((event, moves[:, 0].tolist()))

    def _cross(self, batch: CopyBatch) -> None:
        device, host = self._arenas[batch.group], self._host.rows[batch.group]
        is_down = batch.source_tier == DEVICE
        source_rows, rows = (device, host) if is_down else (host, device)
        self._host.wait(batch.group, max(batch.destinations if is_down else batch.sources))
        for source, destination, count in runs(
            batch.sources, batch.destinations, chunk=self._host.chunk_blocks[batch.group]
        ):
            rows[destination : destination + count].copy_(source_rows[source : source + count], non_blocking=True)


def copy_bytes_per_s(device: torch.device) -> float:
    """How fast blocks move between device and host, one way at a time: measured, in milliseconds."""
    is_cuda = device.type == "cuda"
    host = torch.ones(PROBE_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.ones(PROBE_BYTES, dtype=torch.uint8, device=device)
    best_s = float("inf")
    for probe in range(NUM_PROBES):
        begin_s = time.perf_counter()
        if is_cuda:
            source, destination = (host, there) if probe % 2 else (there, host)
            destination.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
        else:
            np.copyto(there.numpy(), host.numpy())
        best_s = min(best_s, time.perf_counter() - begin_s)
    return PROBE_BYTES / best_s
