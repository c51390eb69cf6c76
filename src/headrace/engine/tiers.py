"""All that one rank keeps of sequences, on every tier, and what a plan moves in it: begin, end, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from headrace.engine.backends import Backends
from headrace.engine.copies import make_mover
from headrace.engine.disk import DiskTier, open_disk
from headrace.engine.external import DeviceBlocks
from headrace.engine.host_tier import HostTier
from headrace.engine.pools import KvPools
from headrace.engine.states import States
from headrace.engine.workers import Workers
from headrace.layers.port import StateSpec
from headrace.seam import DEVICE, HOST, GroupSpec, Ints, PoolSizes, Section, ints
from headrace.transfer._guard import WorkerGuard
from headrace.transfer.port import WorkerConnector

NUM_IO_THREADS = 4


class Memory:
    """Device pools, live states, host and disk tiers, a connector. `begin_step`, rows, `end_step`; `reports` whenever
    a result is built. Tiers that the sizes don't have hold nothing."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        sizes: PoolSizes,
        *,
        block_size: int,
        backends: Backends,
        states: Mapping[int, StateSpec],
        device: torch.device,
        fingerprint: str = "",
        rank: int = 0,
        connector: WorkerConnector | None = None,
    ) -> None:
        """
        Args:
            states: of the recurrent layers, by layer.
            fingerprint, rank: what the disk tier's files are named by.
            connector: to an external store.

        Raises:
            MemoryError: a tier doesn't fit.
            ValueError: the connector refuses the pools.
        """
        self.pools = KvPools(groups, sizes.num_blocks, block_size=block_size, backends=backends, device=device)
        self.states = States(groups, states, num_slots=sizes.num_slots, device=device)
        block_bytes = [arena.shape[1] for arena in self.pools.arenas]
        self.host = HostTier(block_bytes, sizes.host_blocks, device)
        self.disk = DiskTier()
        if sizes.disk_blocks:
            self.disk = open_disk(
                sizes.disk_folder,
                fingerprint=fingerprint,
                rank=rank,
                block_bytes=block_bytes,
                num_blocks=sizes.disk_blocks,
            )
        self._mover = make_mover(self.pools.arenas, self.host, device)
        self._io = Workers(NUM_IO_THREADS, name="headrace-kv-disk")
        self._external = WorkerGuard(connector)
        self._external.register(DeviceBlocks(self.pools.arenas))

    def begin_step(self, section: Section) -> None:
        """What comes before the rows: new states, a connector's saves, copies, restored states, a connector's loads;
        and transfers begin."""
        self.states.begin([init.slot for init in section.inits])
        self._external.save(section.external)
        if len(section.copies):
            self._mover.copy(section.copies)
        if len(section.restores):
            self.states.restore(section.restores, self.pools.arenas)
        self._external.load(section.external)
        if len(section.transfers):
            self._begin_transfers(section.transfers)

    def end_step(self, section: Section) -> None:
        """What comes after the rows."""
        if len(section.saves):
            self.states.save(section.saves, self.pools.arenas)

    def reports(self) -> tuple[Ints, Ints]:
        """Ids of what ended since the last call, copies, transfers or a connector's work; and those that failed."""
        done = self._mover.take_done() + self._io.take_done() + self._external.take_done()
        return ints([copy_id for copy_id, _ in done]), ints([copy_id for copy_id, worked in done if not worked])

    def close(self) -> None:
        """Ends threads and gives files and pinned memory back; what is on its way is let arrive or dropped."""
        self._external.close()
        self._mover.close()
        if self._io.close():
            self.disk.close()  # otherwise the system closes them, when a job that hangs has ended
        self.host.close()

    def _begin_transfers(self, transfers: Ints) -> None:
        down = transfers[:, 2] == DEVICE
        if down.any():
            self._mover.send_down(transfers[down])
        for copy_id, group, source_tier, source, _, destination, stamp in transfers[~down].tolist():
            if source_tier == HOST:
                self._io.begin(copy_id, self._writing(group, source, destination, stamp))
            else:
                self._io.begin(copy_id, self._reading(group, source, destination, stamp))

    def _writing(self, group: int, source: int, destination: int, stamp: int) -> Callable[[], bool]:
        return lambda: self.disk.write(group, destination, stamp, self.host.arrays[group][source])

    def _reading(self, group: int, source: int, destination: int, stamp: int) -> Callable[[], bool]:
        def job() -> bool:
            self.host.wait(group, destination)  # who pins the memory writes to it
            return self.disk.read(group, source, stamp, self.host.arrays[group][destination])

        return job
