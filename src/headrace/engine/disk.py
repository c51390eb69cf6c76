"""The disk tier's files: one a group and rank, of fixed slots, each with a stamp and a checksum.

Format, little-endian. A header of HEADER_BYTES: MAGIC, the length of a JSON object (4 bytes) and that object
(fingerprint, group, rank, bytes of a block). Slot n lies at HEADER_BYTES + n * stride: SLOT (magic, stamp, number,
CRC-32 of stamp, number and content), then the block's bytes. Slots never written are holes, so the file grows as it is
used.

Nothing here raises for a fault of the disk or of what is on it: the block is then not there.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("headrace.engine")

MAGIC = b"headrace kv blocks 1\n"
HEADER_BYTES = 4096
ALIGN_BYTES = 4096
SLOT = struct.Struct("<8sqqI4x")
SLOT_MAGIC = b"hr-block"
KEY = struct.Struct("<qq")
"""Stamp and number, as the checksum has them."""
QUIET_S = 60.0
"""Faults of one kind are told at most so often."""

Bytes = NDArray[np.uint8]


class BlockFile:
    """The blocks of one group of one rank. Threads may read and write different blocks at once."""

    def __init__(self, path: Path, facts: dict[str, Any], *, block_bytes: int, num_blocks: int) -> None:
        """
        Args:
            facts: what a file has to say of itself for its blocks to be ours.

        Raises:
            OSError: the file can't be used.
        """
        self.path = path
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.num_failed = 0
        self._stride = -(-(SLOT.size + block_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        self._told_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            self._begin({**facts, "block_bytes": block_bytes})
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, block: int, stamp: int, content: Bytes) -> bool:
        """Keep a block's bytes under a stamp. False: they are not kept."""
        assert 0 < block < self.num_blocks and content.nbytes == self.block_bytes, (block, content.nbytes)
        data = content.data
        header = SLOT.pack(SLOT_MAGIC, stamp, block, _checksum(data, block, stamp))
        try:
            written = os.pwritev(self._fd, (header, data), self._place(block))
        except OSError as error:
            return self._fail("can't be written", error.strerror or str(error))
        if written != SLOT.size + self.block_bytes:
            return self._fail("can't be written", os.strerror(errno.ENOSPC))
        return True

    def read(self, block: int, stamp: int, into: Bytes) -> bool:
        """Read back what was written under that stamp. False: it isn't there, and `into` holds anything."""
        assert 0 < block < self.num_blocks and into.nbytes == self.block_bytes, (block, into.nbytes)
        header, data = bytearray(SLOT.size), into.data
        try:
            count = os.preadv(self._fd, (header, data), self._place(block))
        except OSError as error:
            return self._fail("can't be read", error.strerror or str(error))
        if count != SLOT.size + self.block_bytes:
            return self._fail("is truncated", f"block {block}")
        magic, kept_stamp, kept_block, checksum = SLOT.unpack(header)
        if not any(header):
            return self._fail("has a hole where a block was asked for", f"block {block}")
        if magic != SLOT_MAGIC or kept_block != block or checksum != _checksum(data, block, kept_stamp):
            return self._fail("is damaged", f"block {block}")
        if kept_stamp != stamp:
            return self._fail("holds another block than asked for", f"block {block}")
        return True

    def close(self) -> None:
        os.close(self._fd)

    def _place(self, block: int) -> int:
        return HEADER_BYTES + block * self._stride

    def _fail(self, what: str, reason: str) -> bool:
        with self._lock:
            self.num_failed += 1
            now_s = time.monotonic()
            quiet = now_s - self._told_s.get(what, -QUIET_S) < QUIET_S
            if not quiet:
                self._told_s[what] = now_s
            count = self.num_failed
        if not quiet:
            log.warning(
                "%s %s (%s): such blocks are computed again; %d transfers failed so far", self.path, what, reason, count
            )
        return False

    # ---- the header --------------------------------------------------------------------------

    def _begin(self, facts: dict[str, Any]) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EWOULDBLOCK, "another server uses it") from None
        found = os.pread(self._fd, HEADER_BYTES, 0)
        # Cut short, or with a header that a crash of the machine left unwritten, it is still ours.
        if any(found) and found[: len(MAGIC)] != MAGIC[: len(found)]:
            raise OSError(errno.EEXIST, "it is not a file of blocks: move it away")
        is_ours = _header_facts(found) == facts
        if found and not is_ours:
            log.warning("%s is of another model, shape or version: it is ignored and written anew", self.path)
        if not is_ours:
            os.ftruncate(self._fd, 0)
            text = json.dumps(facts, sort_keys=True).encode()
            header = MAGIC + struct.pack("<I", len(text)) + text
            assert len(header) <= HEADER_BYTES, len(header)
            if os.pwrite(self._fd, header.ljust(HEADER_BYTES, b"\0"), 0) != HEADER_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if os.fstat(self._fd).st_size > self._place(self.num_blocks):
            os.ftruncate(self._fd, self._place(self.num_blocks))  # a smaller disk_cache_size than before


def _header_facts(header: bytes) -> Any:
    """None: there is no whole header."""
    try:
        (length,) = struct.unpack_from("<I", header, len(MAGIC))
        return json.loads(header[len(MAGIC) + 4 :][:length])
    except (struct.error, ValueError):
        return None


def _checksum(data: memoryview, block: int, stamp: int) -> int:
    return zlib.crc32(data, zlib.crc32(KEY.pack(stamp, block)))


class DiskTier:
    """The files of one rank by group; none when there is no disk tier, and then every transfer fails."""

    def __init__(self, files: Sequence[BlockFile] = ()) -> None:
        self.files: tuple[BlockFile, ...] = tuple(files)
        """Gone once it is closed."""

    @property
    def num_failed(self) -> int:
        return sum(file.num_failed for file in self.files)

    def write(self, group: int, block: int, stamp: int, content: Bytes) -> bool:
        return bool(self.files) and self.files[group].write(block, stamp, content)

    def read(self, group: int, block: int, stamp: int, into: Bytes) -> bool:
        return bool(self.files) and self.files[group].read(block, stamp, into)

    def close(self) -> None:
        files, self.files = self.files, ()
        for file in files:
            file.close()


def open_disk(
    folder: str | Path,
    *,
    fingerprint: str,
    rank: int,
    block_bytes: Sequence[int],
    num_blocks: Sequence[int],
) -> DiskTier:
    """Open or create the files; what an earlier run of the same model left in them stays.

    A folder belongs to one server at a time: a second one goes on without a disk tier, with a warning, as does one
    whose files can't be used.
    """
    name = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    files: list[BlockFile] = []
    for group, (size, count) in enumerate(zip(block_bytes, num_blocks, strict=True)):
        path = Path(folder) / f"kv-{name}-group{group}-rank{rank}.blocks"
        facts = {"fingerprint": fingerprint, "group": group, "rank": rank}
        try:
            files.append(BlockFile(path, facts, block_bytes=size, num_blocks=count))
        except OSError as error:
            log.warning(
                "kv_cache_config.disk_cache_path: %s can't be used: %s: serving goes on without a disk tier",
                path,
                error.strerror or error,
            )
            DiskTier(files).close()
            return DiskTier()
    return DiskTier(files)
