"""What a job's bytes are cut into: messages that are ready to be sent, and the error that ends a call.

A frame is its kind (one byte), its sequence and its length (4 bytes each, big-endian), and that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from headrace.front.errors import RequestError

__all__ = ["chunk_frame", "error_frame", "message_frame", "read_frames"]

HEADER = struct.Struct(">BII")
MESSAGE, CHUNK, ERROR = 0, 1, 2
MAX_JOINED_BYTES = 256 << 10
"""A client takes messages of 4 MiB unless it says otherwise."""


class _Error(msgspec.Struct):
    message: str
    param: str | None
    code: str | None
    status: int


def message_frame(data: bytes) -> bytes:
    return HEADER.pack(MESSAGE, 0, len(data)) + data


def chunk_frame(data: bytes, sequence: int) -> bytes:
    """A message that may be joined with the next one of its sequence."""
    return HEADER.pack(CHUNK, sequence, len(data)) + data


def error_frame(error: RequestError) -> bytes:
    data = msgspec.msgpack.encode(_Error(error.message, error.param, error.code, error.status))
    return HEADER.pack(ERROR, 0, len(data)) + data


def read_frames(data: bytes) -> Iterator[bytes | RequestError]:
    """Of whole frames. Chunks that have gathered are joined: one after the other, two messages are read as one that
    has the repeated fields of both and the last of the others."""
    position = 0
    gathered: dict[int, bytes] = {}
    while position < len(data):
        kind, sequence, length = HEADER.unpack_from(data, position)
        position += HEADER.size
        piece = data[position : position + length]
        position += length
        if kind == CHUNK:
            before = gathered.get(sequence, b"")
            if len(before) > MAX_JOINED_BYTES:
                yield before
                before = b""
            gathered[sequence] = before + piece
            continue
        yield from gathered.values()
        gathered = {}
        yield piece if kind == MESSAGE else _error(piece)
    yield from gathered.values()


def _error(data: bytes) -> RequestError:
    told = msgspec.msgpack.decode(data, type=_Error)
    return RequestError(told.message, param=told.param, code=told.code, status=told.status)
