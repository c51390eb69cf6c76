"""A file of checksummed records that is appended to, and written anew when it has grown. Faults come back as text."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

FRAME = struct.Struct("<II")
"""Length of the record, CRC-32 of it."""


class Journal:
    """One process at a time: the lock is on a file beside it, since the journal itself is replaced.

    Nothing is flushed to the disk: what a crash of the machine loses or mixes up is for the records' owner to notice.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self.size = 0
        self._header = header
        self._fd = -1
        self._lock_fd = -1

    @property
    def is_open(self) -> bool:
        """Whether records are taken."""
        return self._fd >= 0

    def read(self) -> bytes | None:
        """What follows the header; None when there is another header. Raises OSError, also when it is in use."""
        assert self._lock_fd < 0, "it is read once"
        self._lock_fd = _lock(self.path.with_suffix(".lock"))
        try:
            fd = _open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with open(fd, "rb") as file:
            return file.read() if file.read(len(self._header)) == self._header else None

    def append(self, records: Iterable[bytes]) -> str:
        """All or none. Not empty: what was in the way; then `is_open` tells whether others may still be taken."""
        data = b"".join(map(_framed, records))
        problem = _write(self._fd, data)
        if not problem:
            self.size += len(data)
            return ""
        try:
            os.ftruncate(self._fd, self.size)  # half a record would hide all that follow it
        except OSError:
            os.close(self._fd)
            self._fd = -1
        return problem

    def rewrite(self, records: Iterable[bytes]) -> str:
        """A new file with these records in the old one's place; opens the journal. Not empty: what was in the way."""
        new = self.path.with_suffix(".new")
        try:
            fd = _open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        except OSError as error:
            return error.strerror or str(error)
        data = b"".join([self._header, *map(_framed, records)])
        problem = _write(fd, data)
        try:
            if not problem:
                os.replace(new, self.path)
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            os.close(fd)
            new.unlink(missing_ok=True)
            return problem
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.size = fd, len(data)
        return ""

    def close(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1


def split(data: bytes) -> Iterator[bytes | None]:
    """The records of `Journal.read`; None, and the end, where one is cut or damaged."""
    at = 0
    while at < len(data):
        record = b""
        if len(data) - at >= FRAME.size:
            length, checksum = FRAME.unpack_from(data, at)
            record = data[at + FRAME.size : at + FRAME.size + length]
            if len(record) == length and zlib.crc32(record) == checksum:
                at += FRAME.size + length
                yield record
                continue
        yield None
        return


def num_bytes(record: bytes) -> int:
    """In the file."""
    return FRAME.size + len(record)


def _framed(record: bytes) -> bytes:
    return FRAME.pack(len(record), zlib.crc32(record)) + record


def _open(path: Path, flags: int) -> int:
    """A regular file, for its owner only: the records may hold what users wrote."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is no regular file")
    return fd


def _lock(path: Path) -> int:
    fd = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise OSError("another process uses it") from None
    return fd


def _write(fd: int, data: bytes) -> str:
    """What was in the way of writing all of it; empty: nothing."""
    rest = memoryview(data)
    try:
        while rest:
            written = os.write(fd, rest)
            if not written:
                return "no space left"
            rest = rest[written:]
    except OSError as error:
        return error.strerror or str(error)
    return ""
