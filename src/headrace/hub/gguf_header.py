"""The GGUF container: header, metadata and tensor table, read from a memory map with every bound checked.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian. The `gguf` package has a reader
too; it makes several objects per metadata element, which takes half a minute for a vocabulary of 262,144 tokens, and
it trusts lengths, so that a damaged file can keep it busy for ever.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from headrace.hub.errors import ModelError

__all__ = ["GGUF_MAGIC", "GgufHeader", "TensorInfo", "read_header"]

GGUF_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_FINGERPRINT_BYTES = 1 << 16
# No metadata entry is shorter (key length, type, one byte), and no tensor entry (name length, dims, type, offset).
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first (the file has them the other way round)."""
    qtype: GGMLQuantizationType
    offset_bytes: int
    """From the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and the tensor table in file order.

    Metadata values are int, float, bool, str, or lists of these; float32 values are given as the shortest decimal that
    reads back to them (1e-05, not 9.999999747378752e-06).
    """

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


class _Damaged(Exception):
    """What is wrong with the bytes; turned into a ModelError with the path."""


def read_header(path: Path) -> GgufHeader:
    """Reads everything but the tensor data. The last header is kept, since config, tokenizer and weights ask in turn.

    Raises:
        ModelError: not a GGUF file, an unsupported version, truncated or damaged. Found without reading tensor data.
    """
    try:
        stat = path.stat()
        with path.open("rb") as file:
            start = file.read(_FINGERPRINT_BYTES)
        if not start.startswith(GGUF_MAGIC):
            kind = "is not a GGUF file (its first bytes are not 'GGUF')" if start else "is empty"
            raise ModelError(f"{path} {kind}: give a .gguf file, or fetch it again if the download was cut off")
        return _read_file(path, (stat.st_size, stat.st_mtime_ns, zlib.crc32(start)))
    except _Damaged as error:
        raise ModelError(f"{path} is not usable: {error}; fetch the file again") from None
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}): check the path and its permissions") from None


@lru_cache(maxsize=1)
def _read_file(path: Path, fingerprint: tuple[int, int, int]) -> GgufHeader:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _read(data)


def _read(data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data, len(GGUF_MAGIC))
    version = cursor.scalar("<I")
    if version not in _SUPPORTED_VERSIONS:
        what = "it is big-endian" if version & 0xFFFF == 0 else f"its GGUF version is {version}"
        raise _Damaged(f"{what}, and only little-endian versions {_SUPPORTED_VERSIONS[0]} and 3 are read")
    num_tensors, num_entries = cursor.scalar("<Q"), cursor.scalar("<Q")
    cursor.check_count(num_entries, _MIN_ENTRY_BYTES, "metadata entries")
    cursor.check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        if key in metadata:
            raise _Damaged(f"metadata key {key!r} stands in it twice")
        metadata[key] = cursor.value(_value_type(cursor.scalar("<I"), key), key)
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Damaged(f"general.alignment is {alignment}, not a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_place(*entry, data_start=data_start, alignment=alignment) for entry in entries)
    _check_extent(tensors, len(data))
    return GgufHeader(metadata=metadata, tensors=tensors)


class _Cursor:
    """A position in the file's header; reading past the end raises `_Damaged`."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.position = position

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        return value

    def string(self) -> str:
        num_bytes = self.scalar("<Q")
        return _text(self._take(num_bytes))

    def value(self, value_type: GGUFValueType, key: str) -> Any:
        if value_type is GGUFValueType.STRING:
            return self.string()
        if value_type is GGUFValueType.ARRAY:
            return self._array(key)
        return self._numbers(value_type, 1)[0]

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """A damaged count must not start a loop that the file can't fill."""
        if count * min_bytes > self.size_bytes - self.position:
            raise _Damaged(f"it claims {count} {what} and ends before them, so it is truncated or damaged")

    def _array(self, key: str) -> list[Any]:
        item_type = _value_type(self.scalar("<I"), key)
        count = self.scalar("<Q")
        if item_type is GGUFValueType.STRING:
            self.check_count(count, 8, f"strings in {key}")
            return self._strings(count)
        if item_type is GGUFValueType.ARRAY:
            self.check_count(count, 12, f"arrays in {key}")
            return [self._array(key) for _ in range(count)]
        return self._numbers(item_type, count)

    def _numbers(self, value_type: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[value_type])
        array = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        if value_type is GGUFValueType.FLOAT32 and count < 1024:
            return [float(str(number)) for number in array]
        return array.tolist()

    def _strings(self, count: int) -> list[str]:
        # The hot loop of a large vocabulary, so with local names and without `_take`.
        data, position, size_bytes = self.data, self.position, self.size_bytes
        read_length = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > size_bytes:
                raise _Damaged("it ends in the middle of its header, so it is truncated")
            position = start + read_length(data, position)[0]
            if position > size_bytes:
                raise _Damaged("it ends in the middle of its header, so it is truncated")
            strings.append(_text(data[start:position]))
        self.position = position
        return strings

    def _take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self.size_bytes:
            raise _Damaged("it ends in the middle of its header, so it is truncated")
        taken = self.data[self.position : end]
        self.position = end
        return taken


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _Damaged("a string in its header is not UTF-8, so it is damaged") from None


def _value_type(number: int, key: str) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError:
        raise _Damaged(f"metadata {key!r} has the unknown type {number}, so it is damaged") from None


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.scalar("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _Damaged(f"tensor {name!r} has {num_dims} dimensions, so it is damaged")
    dims = [cursor.scalar("<Q") for _ in range(num_dims)]
    return name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q")


def _place(
    name: str, shape: tuple[int, ...], type_number: int, offset_bytes: int, *, data_start: int, alignment: int
) -> TensorInfo:
    try:
        qtype = GGMLQuantizationType(type_number)
    except ValueError:
        raise _Damaged(f"tensor {name!r} has the unknown type {type_number}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[qtype]
    if shape[-1] % block_size:
        raise _Damaged(f"tensor {name!r} of {qtype.name} has rows of {shape[-1]}, not a multiple of {block_size}")
    if offset_bytes % alignment:
        raise _Damaged(f"tensor {name!r} is not aligned to {alignment} bytes, so it is damaged")
    num_bytes = math.prod(shape) // block_size * block_bytes
    return TensorInfo(name, shape, qtype, data_start + offset_bytes, num_bytes)


def _check_extent(tensors: tuple[TensorInfo, ...], size_bytes: int) -> None:
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise _Damaged("a tensor name stands in it twice")
    end = max((tensor.offset_bytes + tensor.num_bytes for tensor in tensors), default=0)
    if end > size_bytes:
        raise _Damaged(f"it is truncated: {size_bytes:,} bytes of at least {end:,}")
