"""Reading checkpoints tensor by tensor, a run of rows at a time: safetensors and GGUF files.

Safetensors files are read, not mapped: pages of a mapping count as this process's memory, and a load would show twice
the weights.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, a JSON header, then the data).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.hub.gguf import GgufFile, GgufTensor
from headrace.hub.source import ModelSource
from headrace.hub.weights import safetensors_files
from headrace.layers.weights import Part

CHUNK_BYTES = 16 << 20
"""Most bytes of a stored tensor that are in memory at once."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


CODES = (torch.int8, torch.float8_e8m0fnu)


class StoredTensor(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, into: Tensor, part: Part | None = None) -> None:
        """Read the tensor, or a part of it, into a tensor of that shape, converting to its dtype."""
        ...


class SafetensorsFile:
    """An open safetensors file, and the buffer that its tensors pass through.

    The buffer is mapped, not allocated: buffers of this size that come and go leave holes in the allocator's heap, and
    those would count as memory beside the weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._buffer = mmap.mmap(-1, CHUNK_BYTES)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def tensors(self) -> list[FileTensor]:
        """What the header lists, in the order of the data. `safetensors_files` has checked header and file size."""
        header_bytes = int.from_bytes(self.read(0, 8), "little")
        header: dict[str, Any] = json.loads(bytes(self.read(8, header_bytes)))
        header.pop("__metadata__", None)
        entries = [self._tensor(name, value, begin=8 + header_bytes) for name, value in header.items()]
        return sorted(entries, key=lambda entry: entry.begin)

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes of the file, valid until the next call. Shorter where the file ends."""
        if size_bytes > len(self._buffer):
            self._buffer = mmap.mmap(-1, size_bytes)
        view = memoryview(self._buffer)[:size_bytes]
        self._file.seek(offset)
        filled = 0
        while filled < size_bytes and (count := self._file.readinto(view[filled:])):
            filled += count
        return view[:filled]

    def _tensor(self, name: str, value: dict[str, Any], *, begin: int) -> FileTensor:
        if value["dtype"] not in DTYPES:
            raise ValueError(
                f"{self.path}: tensor {name} has the unknown dtype {value['dtype']}: convert the model to bfloat16"
            )
        dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
        start, end = value["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{self.path}: tensor {name} has {end - start} bytes for {list(shape)}: fetch the file again"
            )
        return FileTensor(name, shape, dtype, begin + start, self)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor at a place in an open safetensors file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    """Offset in the file."""
    file: SafetensorsFile

    def read(self, into: Tensor, part: Part | None = None) -> None:
        """Reads runs of rows of at most CHUNK_BYTES, so that no whole tensor lies beside the destination."""
        assert tuple(into.shape) == _part_shape(self.shape, part), (self.name, into.shape, self.shape, part)
        if into.dtype == torch.uint8 and self.dtype in CODES:  # codes, whatever a file calls them
            replace(self, dtype=torch.uint8).read(into, part)
            return
        if into.is_floating_point() and not self.dtype.is_floating_point:
            raise ValueError(
                f"{self.file.path}: tensor {self.name} holds integers ({self.dtype}): such quantised checkpoints are"
                " not available yet: use an unquantised one or a GGUF file"
            )
        if not self.shape:
            into.copy_(self._rows(0, 1, ()).squeeze(0))
            return
        row_shape = self.shape[1:]
        row_bytes = math.prod(row_shape) * self.dtype.itemsize
        first, end = (part.start, part.stop) if part is not None and part.dim == 0 else (0, self.shape[0])
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for start in range(first, end, step):
            stop = min(start + step, end)
            rows = self._rows(start * row_bytes, stop - start, row_shape)
            into[start - first : stop - first].copy_(columns(rows, part))

    def _rows(self, offset: int, num_rows: int, row_shape: tuple[int, ...]) -> Tensor:
        """A view of the file's buffer."""
        size_bytes = num_rows * math.prod(row_shape) * self.dtype.itemsize
        if size_bytes == 0:
            return torch.empty((num_rows, *row_shape), dtype=self.dtype)
        content = self.file.read(self.begin + offset, size_bytes)
        if len(content) < size_bytes:
            raise ValueError(f"{self.file.path} ends inside tensor {self.name}: fetch the file again")
        return torch.frombuffer(content, dtype=self.dtype).view(num_rows, *row_shape)


@dataclass(frozen=True, slots=True)
class GgufRows:
    """A tensor of a GGUF file, dequantised a run of rows at a time."""

    tensor: GgufTensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self, into: Tensor, part: Part | None = None) -> None:
        assert tuple(into.shape) == _part_shape(self.shape, part), (self.name, into.shape, self.shape, part)
        first, end = (part.start, part.stop) if part is not None and part.dim == 0 else (0, self.shape[0])
        for start, chunk in self.tensor.chunks(first, end):
            rows = torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())
            into[start - first : start - first + len(chunk)].copy_(columns(rows, part))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a stored tensor that holds several one after another, as a tensor of its own.

    Scales have fewer rows than the weight that they belong to, and a single number is that of every piece.
    """

    holder: StoredTensor
    name: str
    first: int
    """Row of the weight."""
    rows: int
    total: int
    """Rows of all pieces together."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.holder.shape
        if math.prod(shape) == 1 or shape[0] * self.rows % self.total:
            return shape
        return (shape[0] * self.rows // self.total, *shape[1:])

    def read(self, into: Tensor, part: Part | None = None) -> None:
        if self.shape == self.holder.shape:
            self.holder.read(into, part)
            return
        assert part is None or part.dim == 0, "linears that a checkpoint fuses are sharded by rows"
        start = self.holder.shape[0] * self.first // self.total
        low, high = (0, self.shape[0]) if part is None else (part.start, part.stop)
        self.holder.read(into, Part(0, start + low, start + high))


def _part_shape(shape: tuple[int, ...], part: Part | None) -> tuple[int, ...]:
    if part is None:
        return shape
    return (*shape[: part.dim], part.length, *shape[part.dim + 1 :])


def columns(rows: Tensor, part: Part | None) -> Tensor:
    if part is None or part.dim == 0:
        return rows
    if part.pieces == 1:
        return rows.narrow(part.dim, part.start, part.stop - part.start)
    pieces = rows.unflatten(part.dim, (part.pieces, -1))
    return pieces.narrow(part.dim + 1, part.start, part.stop - part.start).flatten(part.dim, part.dim + 1)


def read_checkpoint(source: ModelSource) -> Iterator[StoredTensor]:
    """The tensors of a model on disk, in file order. Each is to be read before the next is asked for.

    Raises:
        ValueError: no weights that may be loaded, a missing shard, or a truncated or damaged file.
    """
    if source.kind == "gguf":
        yield from (GgufRows(tensor) for tensor in GgufFile(source.path).tensors())
        return
    for path in safetensors_files(source):
        with SafetensorsFile(path) as file:
            yield from file.tensors()
