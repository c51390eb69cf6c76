"""The host tier's memory: lazy on a CPU, pinned piece by piece beside a GPU (a pretended one here)."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from typing import Any

import pytest
import torch

from headrace.engine import host_tier
from headrace.engine.host_tier import HostTier

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeRuntime:
    """`torch.cuda.cudart()`: registers after `go`, up to `limit_bytes`."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.go = threading.Semaphore(0)
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []
        self.limit_bytes = limit_bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.go.acquire()
        if sum(self.registered.values()) + num_bytes > self.limit_bytes:
            return 2
        assert not any(at < address + num_bytes and address < at + size for at, size in self.registered.items())
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(host_tier, "CHUNK_BYTES", 4 * mmap.PAGESIZE)
    return fake


def test_cpu_memory_is_there_at_once_and_costs_nothing() -> None:
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    host = HostTier([1 << 20], [1 << 11], CPU)  # 2 GiB
    with open("/proc/self/statm") as file:
        grown_bytes = (int(file.read().split()[1]) - before) * mmap.PAGESIZE
    assert host.size_bytes == 1 << 31 and grown_bytes < 1 << 26
    host.wait(0, (1 << 11) - 1)
    host.close()


def test_too_much_names_the_setting() -> None:
    with pytest.raises(MemoryError, match=r"kv_cache_config\.host_cache_size: 1,152,921,504,606,846,976 bytes"):
        HostTier([1 << 30], [1 << 30], CPU)


def test_pinning_goes_on_beside_and_a_copy_waits_for_its_piece(runtime: FakeRuntime) -> None:
    size = mmap.PAGESIZE // 2
    host = HostTier([size], [20], CUDA)
    assert host.chunk_blocks == [8]
    waited = threading.Event()

    def wait(block: int) -> None:
        host.wait(0, block)
        waited.set()

    runtime.go.release()
    host.wait(0, 7)  # of the first piece, while the second is held up
    threading.Thread(target=wait, args=(8,), daemon=True).start()
    assert not waited.wait(0.1)
    runtime.go.release()
    assert waited.wait(5)
    runtime.go.release()
    host.wait(0, 19)
    assert sorted(runtime.registered.values()) == [4 * size, 8 * size, 8 * size]
    host.close()
    assert sorted(runtime.unregistered) == sorted(runtime.registered)


def test_refused_pinning_leaves_plain_memory(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.limit_bytes = 9 * mmap.PAGESIZE
    for _ in range(100):
        runtime.go.release()
    with caplog.at_level(logging.WARNING):
        host = HostTier([mmap.PAGESIZE, mmap.PAGESIZE], [9, 20], CUDA)
        host.wait(1, 19)
    (record,) = caplog.records
    assert "kv_cache_config.host_cache_size: pinned 36,864 of 118,784 bytes" in record.getMessage()
    host.arrays[1][19] = 1
    host.close()
    assert len(runtime.unregistered) == 3


def test_a_broken_driver_holds_nobody_up(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError("no driver")

    monkeypatch.setattr(runtime, "cudaHostRegister", broken)
    host = HostTier([64], [1000], CUDA)
    host.wait(0, 999)
    host.close()


def test_pieces_are_whole_pages(runtime: FakeRuntime) -> None:
    for size in (16, 100, 4096, 4097, 6000, 1 << 20):
        (blocks,) = HostTier([size], (), CPU).chunk_blocks
        assert blocks * size % mmap.PAGESIZE == 0
