from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from headrace.kvcache import disk_index
from headrace.kvcache import journal as journal_module
from headrace.kvcache.disk_index import DiskIndex
from headrace.kvcache.journal import num_bytes
from headrace.kvcache.radix import NONE, Namespace, RadixIndex
from headrace.seam import GroupSpec

SIZE = 2
BASE = Namespace()
GROUPS = (
    GroupSpec((0,), 1, 8, "float32", bytes_per_token=64),
    GroupSpec((1,), 1, 8, "float32", window=4, bytes_per_token=64),
)


class Life:
    """One run of a process: an index, and what of it is on disk."""

    def __init__(self, folder: Path, *, fingerprint: str = "model", groups: Any = GROUPS, num: int = 1000) -> None:
        self.index = RadixIndex(SIZE, num_pools=len(groups))
        self.disk = DiskIndex(folder, fingerprint, groups, SIZE, num_blocks=(num,) * len(groups))
        self.stamps: dict[tuple[int, int], int] = {}
        self.records = self.disk.load()
        nodes: list[int] = []
        for record in self.records:
            above = self.index.root(record.space) if record.parent == NONE else nodes[record.parent]
            node = self.index.descend(above, record.key)
            nodes.append(node)
            for group, block, stamp in record.blocks:
                self.index.set_block(group, node, block)
                self.stamps[group, block] = stamp

    def store(self, tokens: list[int], block: int, *, group: int = 0, space: Namespace = BASE) -> bool:
        """The last block of `tokens` is on disk."""
        node = self.index.root(space)
        for at in range(len(tokens) // SIZE):
            node = self.index.descend(node, self.index.edge(tokens, at))
        self.index.set_block(group, node, block)
        self.stamps[group, block] = self.disk.next_stamp()
        return self.disk.stored(self.index, node, group=group, block=block, stamp=self.stamps[group, block])

    def drop(self, block: int, *, group: int = 0) -> None:
        node = self.index.blocks[group].index(block)
        self.disk.removed(group, block)
        self.index.clear_block(group, node)
        del self.stamps[group, block]

    @property
    def content(self) -> dict[tuple[int, int], tuple[int, Namespace, bytes]]:
        """By (group, block): stamp, namespace and the keys from the first block on."""
        found: dict[tuple[int, int], tuple[int, Namespace, bytes]] = {}
        index = self.index
        for group, blocks in enumerate(index.blocks):
            for start, block in enumerate(blocks):
                if block != NONE:
                    node, keys = start, b""
                    while node not in index.spaces:
                        keys = index.key[node] + keys
                        node = index.parent[node]
                    found[group, block] = self.stamps[group, block], index.spaces[node], keys
        return found

    def end(self) -> dict[tuple[int, int], tuple[int, Namespace, bytes]]:
        content = self.content
        self.disk.close()
        return content


def test_an_empty_folder_has_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert Life(tmp_path).records == []
    assert not caplog.records


def test_a_restart_finds_what_was_stored(tmp_path: Path):
    one = Life(tmp_path)
    salted = Namespace(salt="s", adapter=3, revision="r", dtypes=("float32", "fp8"))
    assert one.store([1, 2], 1)
    assert one.store([1, 2, 3, 4], 2)
    assert one.store([1, 2, 3, 4], 7, group=1)
    assert one.store([1, 2, 3, 4, 5, 6, 7, 8], 3)  # below a hole
    assert one.store([1, 2], 4, space=salted)
    assert one.store([9, 9], 5)
    one.drop(5)
    content = one.end()
    two = Life(tmp_path)
    assert len(content) == 5
    assert two.content == content
    assert all(record.parent < at for at, record in enumerate(two.records))


def test_a_block_that_is_stored_again_is_the_later_one(tmp_path: Path):
    one = Life(tmp_path)
    one.store([1, 2], 1)
    one.drop(1)
    one.store([3, 4], 1)
    content = one.end()
    assert Life(tmp_path).content == content


def test_removing_what_is_not_there_is_nothing(tmp_path: Path):
    one = Life(tmp_path)
    one.disk.removed(0, 5)
    one.store([1, 2], 1)
    content = one.end()
    assert Life(tmp_path).content == content


def test_stamps_of_two_lives_differ(tmp_path: Path):
    one = Life(tmp_path)
    first = {one.disk.next_stamp() for _ in range(1000)}
    one.end()
    two = Life(tmp_path)
    second = {two.disk.next_stamp() for _ in range(1000)}
    assert len(first) == len(second) == 1000
    assert not first & second
    assert all(0 <= stamp < 2**31 for stamp in first | second)


def journal(folder: Path) -> Path:
    (path,) = folder.glob("*.index")
    return path


@pytest.mark.parametrize("cut", [1, 5, 20, 60])
def test_a_truncated_journal_is_cut_at_the_last_whole_record(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
):
    one = Life(tmp_path)
    one.store([1, 2], 1)
    first = one.content
    one.store([1, 2, 3, 4], 2)
    one.end()
    path = journal(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    two = Life(tmp_path)
    assert two.content == first
    assert len(caplog.records) == 1 and "damaged" in caplog.text
    two.store([5, 6], 9)
    content = two.end()
    caplog.clear()
    assert Life(tmp_path).content == content, "the damage is gone"
    assert not caplog.records


def test_whatever_byte_is_damaged_nothing_wrong_is_found(tmp_path: Path):
    one = Life(tmp_path)
    one.store([1, 2], 1, space=Namespace(salt="secret"))
    one.store([1, 2, 3, 4], 2, space=Namespace(salt="secret"))
    one.store([1, 2, 3, 4], 2, group=1)
    one.drop(2)
    content = one.end()
    path = journal(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        two = Life(tmp_path)
        for key, value in two.end().items():
            if key == (0, 2):  # its removal was damaged; the stamp says whether its bytes are still there
                assert value[2] == RadixIndex(SIZE, num_pools=1).edge([1, 2], 0) + RadixIndex(SIZE, num_pools=1).edge(
                    [3, 4], 0
                )
            else:
                assert content[key] == value, at


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "another"},
        {"groups": GROUPS[:1]},
        {"groups": (GROUPS[0], GroupSpec((1,), 1, 8, "float32", window=8, bytes_per_token=64))},
    ],
)
def test_a_journal_of_another_model_is_not_read(
    tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    one = Life(tmp_path)
    one.store([1, 2], 1)
    one.end()
    foreign = journal(tmp_path)
    two = Life(tmp_path, **other)
    assert two.records == []
    two.end()
    if "fingerprint" in other:
        foreign.rename(two.disk.path)
        assert Life(tmp_path, **other).records == []
    assert len(caplog.records) == 1 and "another model" in caplog.text


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 4096, os.urandom(4096)])
def test_any_other_file_is_ignored_and_written_anew(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture):
    path = DiskIndex(tmp_path, "model", GROUPS, SIZE, num_blocks=(9, 9)).path
    path.write_bytes(content)
    one = Life(tmp_path)
    assert one.records == []
    assert len(caplog.records) == 1
    one.store([1, 2], 1)
    kept = one.end()
    assert Life(tmp_path).content == kept


def test_blocks_beyond_a_smaller_tier_are_forgotten(tmp_path: Path):
    one = Life(tmp_path)
    one.store([1, 2], 1)
    one.store([1, 2, 3, 4], 50)
    one.end()
    two = Life(tmp_path, num=50)
    assert list(two.content) == [(0, 1)]
    two.end()
    assert list(Life(tmp_path).content) == [(0, 1)]


def test_one_process_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    one = Life(tmp_path)
    one.store([1, 2], 1)
    two = Life(tmp_path)
    assert two.records == []
    assert "another process" in caplog.text and len(caplog.records) == 1
    assert not two.store([7, 8], 1)
    two.drop(1)
    two.disk.close()
    content = one.end()
    assert Life(tmp_path).content == content


@pytest.mark.parametrize("kind", ["missing", "file", "fifo", "link"])
def test_a_folder_that_can_not_be_used_keeps_nothing(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "folder"
    if kind == "file":
        folder.write_text("")
    elif kind != "missing":
        folder.mkdir()
        path = DiskIndex(folder, "model", GROUPS, SIZE, num_blocks=(9, 9)).path
        if kind == "fifo":
            os.mkfifo(path)
        else:
            (tmp_path / "elsewhere").write_bytes(b"precious")
            path.symlink_to(tmp_path / "elsewhere")
    one = Life(folder)
    assert one.records == []
    assert len(caplog.records) == 1
    one.store([1, 2], 1)
    one.drop(1)
    one.end()
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes() == b"precious"


class Disk:
    """`os.write` on a disk that has room for so many more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(journal_module.os, "write", self.write)

    def write(self, fd: int, data: Any) -> int:
        if self.room is None:
            return self._write(fd, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = min(len(data), self.room)
        self.room -= part
        return self._write(fd, data[:part])


def test_a_full_disk_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    disk = Disk(monkeypatch)
    one = Life(tmp_path)
    one.store([1, 2], 1)
    kept = one.content
    disk.room = 37  # half a record
    assert not one.store([3, 4, 5, 6], 2)
    assert not one.store([3, 4], 3)
    assert len(caplog.records) == 1 and "No space" in caplog.text
    disk.room = None
    assert one.store([7, 8], 4), "there is room again"
    later = one.end()
    two = Life(tmp_path)
    assert two.content == {key: later[key] for key in [*kept, (0, 4)]}


@pytest.mark.parametrize("room", range(0, 400, 7))
def test_a_disk_that_fills_up_anywhere_leaves_a_whole_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
):
    disk = Disk(monkeypatch)
    one = Life(tmp_path)
    disk.room = room
    stored = [one.store([at, at, at, at], at) for at in range(1, 6)]
    content = one.end()
    disk.room = None
    caplog.clear()
    two = Life(tmp_path)
    assert two.content == {(0, at): content[0, at] for at in range(1, 6) if stored[at - 1]}
    assert not caplog.records


def test_a_start_on_a_full_disk_finds_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = Life(tmp_path)
    one.store([1, 2], 1)
    content = one.end()
    disk = Disk(monkeypatch)
    disk.room = 0
    two = Life(tmp_path)
    assert two.content == content
    assert not two.store([3, 4], 2)
    two.end()
    disk.room = None
    assert Life(tmp_path).content == content


def test_a_journal_that_is_mostly_out_of_date_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_index, "COMPACT_BYTES", 2000)
    one = Life(tmp_path)
    for turn in range(300):
        one.store([turn, turn, turn, 1], 1 + turn % 7, space=Namespace(salt=str(turn % 3)))
        if turn >= 6:
            one.drop(1 + (turn + 1) % 7)
    assert journal(tmp_path).stat().st_size < 8000
    assert len(one.disk._nodes) < 40 and len(one.disk._by_id) < 40
    content = one.end()
    assert Life(tmp_path).content == content


def test_only_the_owner_may_read_it(tmp_path: Path):
    one = Life(tmp_path)
    one.store([1, 2], 1)
    assert journal(tmp_path).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_history_survives_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setattr(disk_index, "COMPACT_BYTES", 500)
    rng = random.Random(seed)
    life = Life(tmp_path)
    for _ in range(600):
        what = rng.random()
        if what < 0.02:
            content = life.end()
            life = Life(tmp_path)
            assert life.content == content
        elif what < 0.5 and life.stamps:
            group, block = rng.choice(sorted(life.stamps))
            life.drop(block, group=group)
        else:
            group, block = rng.randrange(2), rng.randrange(1, 12)
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 6))]
            space = Namespace(salt=rng.choice("ab"))
            taken = {value[1:] for (g, _), value in life.content.items() if g == group}
            keys = b"".join(life.index.edge(tokens, at) for at in range(len(tokens) // SIZE))
            if (group, block) not in life.stamps and (space, keys) not in taken:
                assert life.store(tokens, block, group=group, space=space)
        assert life.disk._live_bytes == sum(map(num_bytes, life.disk._everything()))
