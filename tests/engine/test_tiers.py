"""A rank's memory over all tiers, driven by sections: what a plan asks for happens, is reported, and may fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.engine.backends import Backends
from headrace.engine.disk import BlockFile
from headrace.engine.tiers import Memory
from headrace.layers.port import StateSpec
from headrace.seam import DEVICE, DISK, HOST, ExternalWork, GroupSpec, PoolSizes, Section, int_rows
from headrace.transfer.port import KvMemory, NoWorker, WorkerConnector

KV = GroupSpec((0, 1), 2, 8, "float32", bytes_per_token=2 * 2 * 2 * 8 * 4)
STATE = StateSpec(((5,), (2, 3)), (torch.float32, torch.bfloat16))
RECURRENT = GroupSpec((2,), 0, 0, "float32", state_bytes=48)
GROUPS = (KV, RECURRENT)
NUM_BLOCKS = 8


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Memory]]:
    made: list[Memory] = []

    def make(
        *, device: str = "cpu", host: bool = True, disk: bool = True, connector: WorkerConnector | None = None
    ) -> Memory:
        sizes = PoolSizes(
            (NUM_BLOCKS, NUM_BLOCKS),
            3,
            host_blocks=(NUM_BLOCKS, NUM_BLOCKS) if host else (),
            disk_blocks=(NUM_BLOCKS, NUM_BLOCKS) if disk else (),
            disk_folder=str(tmp_path),
        )
        made.append(
            Memory(
                GROUPS,
                sizes,
                block_size=4,
                backends=Backends(),
                states={2: STATE},
                device=torch.device(device),
                fingerprint="f",
                connector=connector,
            )
        )
        return made[-1]

    yield make
    for memory in made:
        memory.close()


def fill(memory: Memory) -> None:
    """Every device block of a group says so: group * 100 + block."""
    for group, arena in enumerate(memory.pools.arenas):
        arena.copy_(torch.arange(NUM_BLOCKS, dtype=torch.uint8)[:, None] + 100 * group)


def device_block(memory: Memory, group: int, block: int) -> int:
    (value,) = memory.pools.arenas[group][block].unique().tolist()
    return value


def host_block(memory: Memory, group: int, block: int) -> int:
    (value,) = np.unique(memory.host.arrays[group][block]).tolist()
    return value


def copies(*rows: tuple[int, ...]) -> Section:
    return Section(copies=int_rows(rows, 6))


def transfers(*rows: tuple[int, ...]) -> Section:
    return Section(transfers=int_rows(rows, 7))


def reports(memory: Memory, *, count: int) -> tuple[set[int], set[int]]:
    """As an idle engine: empty plans until so many have ended."""
    finished: list[int] = []
    failed: list[int] = []
    deadline_s = time.monotonic() + 20
    while len(finished) < count:
        assert time.monotonic() < deadline_s, (finished, failed)
        memory.begin_step(Section())
        done, broken = memory.reports()
        finished += done.tolist()
        failed += broken.tolist()
        time.sleep(0.001)
    assert len(set(finished)) == len(finished) and set(failed) <= set(finished)
    return set(finished), set(failed)


def test_blocks_are_the_bytes_that_were_planned(make: Callable[..., Memory]) -> None:
    memory = make()
    assert [arena.shape for arena in memory.pools.arenas] == [(NUM_BLOCKS, KV.block_bytes(4)), (NUM_BLOCKS, 48)]
    assert memory.host.size_bytes == memory.pools.size_bytes == NUM_BLOCKS * (KV.block_bytes(4) + 48)


def check_copies(memory: Memory) -> None:
    fill(memory)
    memory.begin_step(
        copies(
            (1, 0, DEVICE, 1, HOST, 5),  # evicted,
            (2, 0, DEVICE, 2, DEVICE, 1),  # its block taken by a fork
            (3, 0, DEVICE, 1, DEVICE, 3),  # and that copied on,
            (4, 0, HOST, 5, DEVICE, 2),  # and brought back elsewhere
            (5, 1, DEVICE, 6, HOST, 6),
            (6, 0, DEVICE, 2, HOST, 6),
        )
    )
    assert [device_block(memory, 0, block) for block in (1, 2, 3, 4)] == [2, 1, 2, 4]
    assert reports(memory, count=6) == ({1, 2, 3, 4, 5, 6}, set())
    assert host_block(memory, 0, 5) == host_block(memory, 0, 6) == 1 and host_block(memory, 1, 6) == 106
    memory.begin_step(copies((7, 1, HOST, 6, DEVICE, 1)))
    assert device_block(memory, 1, 1) == 106


def check_transfers(memory: Memory) -> None:
    fill(memory)
    memory.begin_step(transfers(*((i, i % 2, DEVICE, i, HOST, i, -1) for i in (1, 2, 3))))
    assert reports(memory, count=3) == ({1, 2, 3}, set())
    memory.begin_step(transfers(*((i + 10, i % 2, HOST, i, DISK, i, 1000 + i) for i in (1, 2, 3))))
    assert reports(memory, count=3) == ({11, 12, 13}, set())
    for array in memory.host.arrays:
        array[:] = 255
    memory.begin_step(transfers(*((i + 20, i % 2, DISK, i, HOST, 7 - i, 1000 + i) for i in (1, 2, 3))))
    assert reports(memory, count=3) == ({21, 22, 23}, set())
    assert [host_block(memory, i % 2, 7 - i) for i in (1, 2, 3)] == [101, 2, 103]


def test_copies_run_in_order(make: Callable[..., Memory]) -> None:
    check_copies(make())


def test_transfers_down_and_up(make: Callable[..., Memory]) -> None:
    check_transfers(make())


def test_the_disk_outlives_the_engine(make: Callable[..., Memory]) -> None:
    first = make()
    check_transfers(first)
    first.close()
    second = make()
    second.begin_step(transfers((1, 1, DISK, 1, HOST, 2, 1001), (2, 0, DISK, 2, HOST, 2, 1003)))
    assert reports(second, count=2) == ({1, 2}, {2})
    assert host_block(second, 1, 2) == 101


def test_a_failed_transfer_is_reported_as_such(make: Callable[..., Memory]) -> None:
    memory = make()
    memory.begin_step(transfers((1, 0, DISK, 3, HOST, 3, 5), (2, 0, HOST, 1, DISK, 1, 5)))
    assert reports(memory, count=2) == ({1, 2}, {1})
    assert memory.disk.num_failed == 1


def test_without_a_disk_its_transfers_fail(make: Callable[..., Memory]) -> None:
    memory = make(disk=False)
    memory.begin_step(transfers((1, 0, HOST, 1, DISK, 1, 5), (2, 0, DEVICE, 1, HOST, 2, -1)))
    assert reports(memory, count=2) == ({1, 2}, {1})


def test_a_step_does_not_wait_for_the_disk(make: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make()
    go = threading.Event()
    write = BlockFile.write
    monkeypatch.setattr(BlockFile, "write", lambda *arguments: go.wait(20) and write(*arguments))
    memory.begin_step(transfers((1, 0, HOST, 1, DISK, 1, 5)))
    memory.begin_step(copies((2, 0, DEVICE, 1, HOST, 2)))
    assert [ids.tolist() for ids in memory.reports()] == [[2], []]
    go.set()
    assert reports(memory, count=1) == ({1}, set())


def test_a_bug_in_a_transfer_is_a_failed_transfer(make: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make()

    def broken(*_: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(BlockFile, "write", broken)
    memory.begin_step(transfers(*((i, 0, HOST, i, DISK, i, 5) for i in range(1, 7))))
    assert reports(memory, count=6) == ({1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6})


def test_threads_start_when_they_are_needed_and_end(make: Callable[..., Memory]) -> None:
    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-kv")}

    before = threads()
    memory = make()
    memory.begin_step(copies((1, 0, DEVICE, 1, HOST, 1)))
    assert threads() == before
    memory.begin_step(transfers((2, 0, HOST, 1, DISK, 1, 5), (3, 0, DEVICE, 1, HOST, 2, -1)))
    assert threads() > before
    begin_s = time.monotonic()
    memory.close()
    assert threads() == before and time.monotonic() - begin_s < 4


def test_closing_does_not_wait_for_a_hanging_disk(make: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make()
    go = threading.Event()
    monkeypatch.setattr(BlockFile, "write", lambda *_: go.wait(30))
    memory.begin_step(transfers(*((i, 0, HOST, i, DISK, i, 5) for i in range(1, 7))))
    begin_s = time.monotonic()
    memory.close()
    assert time.monotonic() - begin_s < 4
    go.set()


def test_states_begin_with_zeros_are_saved_and_restored(make: Callable[..., Memory]) -> None:
    check_states(make())


def check_states(memory: Memory) -> None:
    vector, matrix = memory.states.layers[2]
    assert vector.shape == (4, 5) and matrix.shape == (4, 2, 3) and matrix.dtype == torch.bfloat16
    vector[1], matrix[1] = 1.5, 2.5
    vector[2], matrix[2] = 3.5, 4.5
    memory.end_step(Section(saves=int_rows([(1, 1, 5), (1, 2, 6)], 3)))
    memory.states.begin([1])
    assert not vector[1].any() and not matrix[1].any() and vector[2].unique().tolist() == [3.5]
    memory.begin_step(
        Section(
            copies=int_rows([(1, 1, DEVICE, 5, HOST, 3), (2, 1, DEVICE, 6, DEVICE, 5)], 6),
            restores=int_rows([(1, 5, 0), (1, 6, 2)], 3),
        )
    )
    assert vector[0].unique().tolist() == [3.5] and matrix[0].unique().tolist() == [4.5]
    memory.begin_step(
        Section(copies=int_rows([(3, 1, HOST, 3, DEVICE, 7)], 6), restores=int_rows([(1, 7, 0), (1, 7, 1)], 3))
    )
    for slot in (0, 1):
        assert vector[slot].unique().tolist() == [1.5] and matrix[slot].unique().tolist() == [2.5]
    assert vector[2].unique().tolist() == [3.5] and not vector[3].any()


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_copies, check_transfers, check_states])
def test_on_a_gpu(make: Callable[..., Memory], check: Callable[[Memory], None]) -> None:
    memory = make(device="cuda")
    check(memory)
    torch.cuda.synchronize()
    memory.host.wait(0, NUM_BLOCKS - 1)
    assert memory.host.rows[0].is_pinned()


@pytest.mark.gpu
def test_many_copies_under_load_on_a_gpu(make: Callable[..., Memory]) -> None:
    """Random plans between kernels that read and write the same blocks, without one wait of the host."""
    memory = make(device="cuda")
    arena = memory.pools.arenas[0]
    fill(memory)
    expected = {DEVICE: list(range(NUM_BLOCKS)), HOST: [0] * NUM_BLOCKS}
    draw = np.random.default_rng(0)
    busy = torch.randn(2048, 2048, device="cuda")
    ways = ((DEVICE, HOST), (HOST, DEVICE), (DEVICE, DEVICE))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(300):
        busy = (busy @ busy).clamp(-1, 1)
        rows: list[tuple[int, ...]] = []
        for at in range(int(draw.integers(1, 9))):
            source_tier, tier = ways[draw.integers(3)]
            source, destination = (int(value) for value in draw.permutation(NUM_BLOCKS - 1)[:2] + 1)
            rows.append((step * 10 + at, 0, source_tier, source, tier, destination))
            expected[tier][destination] = expected[source_tier][source]
        memory.begin_step(copies(*rows))
        want = torch.tensor(expected[DEVICE], dtype=torch.uint8, pin_memory=True).cuda(non_blocking=True)
        wrong += (arena[1:] != want[1:, None]).sum()
        written = 1 + step % (NUM_BLOCKS - 1)  # a row of the step
        arena[written] = step % 256
        expected[DEVICE][written] = step % 256
        memory.reports()
    assert int(wrong) == 0
    assert [device_block(memory, 0, block) for block in range(1, NUM_BLOCKS)] == expected[DEVICE][1:]


class Storing(NoWorker):
    """Saves block 1 of group 0 and loads block 3, at once."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def register_kv_caches(self, memory: KvMemory) -> None:
        self.memory = memory

    def wait_for_save(self, meta: object) -> None:
        self.saved += np.unique(self.memory.read(0, [1])).tolist()

    def start_load_kv(self, meta: object) -> None:
        self.memory.write(0, [3], np.full((1, KV.block_bytes(4)), 77, np.uint8))


def test_a_connector_saves_before_the_copies_and_loads_behind_them(make: Callable[..., Memory]) -> None:
    """What a copy of the plan overwrites is still to be saved, and what it reads may be a block that is loaded over."""
    port = Storing()
    memory = make(connector=port)
    fill(memory)
    memory.begin_step(
        Section(copies=int_rows([(1, 0, DEVICE, 3, DEVICE, 1)], 6), external=ExternalWork("meta", ((-1, 5),)))
    )
    assert port.saved == [1]
    assert device_block(memory, 0, 1) == 3 and device_block(memory, 0, 3) == 77
