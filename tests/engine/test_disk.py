"""The disk tier's files: what was written under a stamp comes back, and nothing else ever does."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.disk import ALIGN_BYTES, HEADER_BYTES, SLOT, Bytes, DiskTier, open_disk

SIZE, COUNT = 5000, 6
STRIDE = 2 * ALIGN_BYTES


@pytest.fixture
def opened() -> Iterator[list[DiskTier]]:
    tiers: list[DiskTier] = []
    yield tiers
    for tier in tiers:
        tier.close()


def open_in(folder: Path, *, fingerprint: str = "model", rank: int = 0, count: int = COUNT) -> DiskTier:
    return open_disk(folder, fingerprint=fingerprint, rank=rank, block_bytes=[SIZE, 64], num_blocks=[count, count])


def content(seed: int, size: int = SIZE) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def reads(tier: DiskTier, block: int, stamp: int, *, size: int = SIZE, group: int = 0) -> Bytes | None:
    into = np.zeros(size, np.uint8)
    return into if tier.read(group, block, stamp, into) else None


def write_some(folder: Path) -> Path:
    """Blocks 1 to 3 of group 0 under stamps 11 to 13. -> its file"""
    tier = open_in(folder)
    for block in (1, 2, 3):
        assert tier.write(0, block, 10 + block, content(block))
    path = tier.files[0].path
    tier.close()
    return path


def test_blocks_come_back_after_a_restart(tmp_path: Path, opened: list[DiskTier]) -> None:
    write_some(tmp_path)
    tier = open_in(tmp_path)
    opened.append(tier)
    for block in (1, 2, 3):
        found = reads(tier, block, 10 + block)
        assert found is not None and np.array_equal(found, content(block))
    assert tier.write(1, 1, 11, content(7, 64))
    assert np.array_equal(reads(tier, 1, 11, size=64, group=1), content(7, 64))  # type: ignore[arg-type]
    assert tier.num_failed == 0
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_another_stamp_or_a_hole_is_a_miss(tmp_path: Path, opened: list[DiskTier]) -> None:
    write_some(tmp_path)
    tier = open_in(tmp_path)
    opened.append(tier)
    assert reads(tier, 1, 12) is None
    assert reads(tier, 5, 0) is None and reads(tier, 5, 15) is None
    assert tier.write(0, 5, 15, content(5)) and reads(tier, 4, 0) is None  # now a hole within the file
    assert tier.write(0, 1, 99, content(9)) and reads(tier, 1, 11) is None
    assert np.array_equal(reads(tier, 1, 99), content(9))  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [0, 8, 16, 24, SLOT.size, SLOT.size + SIZE // 2, SLOT.size + SIZE - 1])
def test_one_damaged_byte_is_a_miss(tmp_path: Path, opened: list[DiskTier], at: int) -> None:
    path = write_some(tmp_path)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * STRIDE + at)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    tier = open_in(tmp_path)
    opened.append(tier)
    assert reads(tier, 2, 12) is None and tier.num_failed == 1
    assert reads(tier, 1, 11) is not None and reads(tier, 3, 13) is not None


def test_a_header_that_was_never_written_is_written_anew(tmp_path: Path, opened: list[DiskTier]) -> None:
    path = write_some(tmp_path)
    with path.open("r+b") as file:
        file.write(bytes(HEADER_BYTES))  # a crash of the machine: the file's length was kept, its first page was not
    tier = open_in(tmp_path)
    opened.append(tier)
    assert reads(tier, 1, 11) is None
    assert tier.write(0, 1, 21, content(4)) and np.array_equal(reads(tier, 1, 21), content(4))  # type: ignore[arg-type]


def test_a_block_in_anothers_place_is_a_miss(tmp_path: Path, opened: list[DiskTier]) -> None:
    path = write_some(tmp_path)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + STRIDE : HEADER_BYTES + 2 * STRIDE] = data[HEADER_BYTES + 2 * STRIDE :][:STRIDE]
    path.write_bytes(data)
    tier = open_in(tmp_path)
    opened.append(tier)
    assert reads(tier, 1, 11) is None and reads(tier, 1, 12) is None


@pytest.mark.parametrize("kept", [0, 10, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3 * STRIDE + 100])
def test_a_truncated_file_serves_what_is_whole(tmp_path: Path, opened: list[DiskTier], kept: int) -> None:
    path = write_some(tmp_path)
    os.truncate(path, kept)
    tier = open_in(tmp_path)
    opened.append(tier)
    assert reads(tier, 3, 13) is None
    assert (reads(tier, 1, 11) is not None) == (kept > HEADER_BYTES)
    assert tier.write(0, 3, 33, content(3)) and reads(tier, 3, 33) is not None


def test_truncated_while_open(tmp_path: Path, opened: list[DiskTier]) -> None:
    path = write_some(tmp_path)
    tier = open_in(tmp_path)
    opened.append(tier)
    os.truncate(path, HEADER_BYTES + STRIDE + 100)
    assert reads(tier, 1, 11) is None and reads(tier, 3, 13) is None
    assert tier.write(0, 3, 33, content(3)) and reads(tier, 3, 33) is not None and reads(tier, 1, 11) is None


def test_another_model_has_files_of_its_own(tmp_path: Path, opened: list[DiskTier]) -> None:
    write_some(tmp_path)
    other, rank = open_in(tmp_path, fingerprint="other"), open_in(tmp_path, rank=1)
    opened += [other, rank]
    assert reads(other, 1, 11) is None and reads(rank, 1, 11) is None
    assert other.write(0, 1, 11, content(8)) and rank.write(0, 1, 11, content(9))
    opened.append(open_in(tmp_path))
    assert np.array_equal(reads(opened[-1], 1, 11), content(1))  # type: ignore[arg-type]


def test_a_foreign_header_is_ignored_and_written_anew(
    tmp_path: Path, opened: list[DiskTier], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_some(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"fingerprint": "model"', b'"fingerprint": "mofel"'))
    opened.append(open_in(tmp_path))
    assert f"{path} is of another model, shape or version" in caplog.text
    assert reads(opened[-1], 1, 11) is None
    assert path.stat().st_size == HEADER_BYTES


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_some(tmp_path)
    path.write_bytes(b"a letter to my aunt")
    tier = open_in(tmp_path)
    assert not tier.files and path.read_bytes() == b"a letter to my aunt"
    assert "kv_cache_config.disk_cache_path" in caplog.text and "move it away" in caplog.text
    assert not tier.write(0, 1, 1, content(1)) and reads(tier, 1, 11) is None
    path.unlink()
    os.mkfifo(path)
    assert not open_in(tmp_path).files and "no regular file" in caplog.text


def test_links_are_not_followed(tmp_path: Path) -> None:
    path = write_some(tmp_path)
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    assert not open_in(tmp_path).files


def test_a_missing_folder_is_no_disk_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not open_in(tmp_path / "gone").files
    assert "goes on without a disk tier" in caplog.text


def test_two_servers_do_not_share(tmp_path: Path, opened: list[DiskTier], caplog: pytest.LogCaptureFixture) -> None:
    first = open_in(tmp_path)
    assert first.write(0, 1, 11, content(1))
    second = open_in(tmp_path)
    assert not second.files and "another server uses it" in caplog.text
    assert not second.write(0, 1, 12, content(2))
    assert reads(first, 1, 11) is not None
    first.close()
    opened.append(open_in(tmp_path))
    assert reads(opened[-1], 1, 11) is not None


@contextlib.contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """The system refuses to let any file grow beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 100, SIZE])
def test_a_full_disk_fails_and_is_told_once(
    tmp_path: Path, opened: list[DiskTier], caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = write_some(tmp_path)
    tier = open_in(tmp_path)
    opened.append(tier)
    with full_disk(HEADER_BYTES + 4 * STRIDE + room):
        outcomes = [tier.write(0, 4, 40 + turn, content(4)) for turn in range(5)]
        assert tier.write(0, 2, 22, content(22))  # where there is room already
    assert outcomes == [False] * 5 and tier.num_failed == 5
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [f"{path} can't be written"]
    assert all(reads(tier, 4, stamp) is None for stamp in (0, 40, 44))
    assert reads(tier, 1, 11) is not None and reads(tier, 2, 22) is not None
    assert tier.write(0, 4, 50, content(4)) and reads(tier, 4, 50) is not None


def test_no_room_for_a_header(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk(100):
        assert not open_in(tmp_path).files
    assert "goes on without a disk tier" in caplog.text


def test_faults_of_the_disk_are_no_exceptions(
    tmp_path: Path, opened: list[DiskTier], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(tmp_path)
    tier = open_in(tmp_path)
    opened.append(tier)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(os, "pwritev", broken)
    with caplog.at_level(logging.WARNING):
        assert reads(tier, 1, 11) is None and not tier.write(0, 1, 11, content(1))
    assert caplog.text.count("Input/output error") == 2 and tier.num_failed == 2


def test_a_smaller_tier_gives_space_back(tmp_path: Path, opened: list[DiskTier]) -> None:
    path = write_some(tmp_path)
    tier = open_in(tmp_path, count=3)
    opened.append(tier)
    assert path.stat().st_size == HEADER_BYTES + 3 * STRIDE
    assert reads(tier, 1, 11) is not None and reads(tier, 2, 12) is not None


def test_the_file_grows_as_it_is_used(tmp_path: Path, opened: list[DiskTier]) -> None:
    tier = open_in(tmp_path, count=1 << 20)
    opened.append(tier)
    assert tier.write(0, (1 << 20) - 1, 1, content(1)) and reads(tier, (1 << 20) - 1, 1) is not None
    assert tier.files[0].path.stat().st_blocks * 512 < 1 << 20
