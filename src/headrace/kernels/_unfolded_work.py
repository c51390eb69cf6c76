"""What the programs of attention over unfolded latents do, listed on the host: `_triton_unfolded.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE = 128
"""Tokens that one program gathers. A row's vectors are followed by zeros up to a multiple of this, so that no tile of
keys reads what is another row's."""


class ContextRow(NamedTuple):
    """A row of a step, as the host knows it."""

    row: int
    first_token: int
    """Among the packed ones."""
    num_tokens: int
    kv_len: int
    """Its tokens in the cache, these included."""


BEGINS, ENDS = 1, 2
"""Flags of a tile: nothing is carried to it, from it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What programs do over one segment of the rows' contexts, on the device."""

    pieces: Tensor  # [pieces, 4] int32: row, first position, tokens, place among the gathered
    tiles: Tensor
    """[tiles, 7] int32: first packed query, queries; the row's place among the gathered; the first query's position in
    the segment, keys of it that any query sees; where the tile is carried; flags."""
    num_kv: int
    """Vectors that are gathered, with the zeros between rows."""
    num_carried: int
    """Tiles of all segments."""


def works_of(
    rows: Sequence[ContextRow], tokens: int, *, segment: int | None = None, device: torch.device
) -> tuple[Work, ...]:
    """One copy to the device, which waits for nothing.

    Args:
        tokens: queries of a tile.
        segment: keys of each row at a time; None is all.
    """
    longest = max(row.kv_len for row in rows)
    segment = segment or longest
    tiles = [(row, at) for row in rows for at in range(0, row.num_tokens, tokens)]
    # Late tiles, which see the most, go first.
    tiles.sort(key=lambda tile: tile[0].num_tokens - tile[0].kv_len - tile[1])
    lists: list[list[tuple[int, ...]]] = []
    for begin in range(0, longest, segment):
        pieces, places = _pieces(rows, begin, segment)
        lists += [pieces, _tiles(tiles, places, begin, segment, tokens)]
    host = np.array([number for entries in lists for entry in entries for number in entry], np.int32)
    packed = _pinned(host, device).to(device, non_blocking=True)
    parts = packed.split([sum(len(entry) for entry in entries) for entries in lists])
    counts = [PIECE * len(pieces) for pieces in lists[::2]]
    return tuple(
        Work(pieces.view(-1, 4), programs.view(-1, 7), num_kv, len(tiles))
        for pieces, programs, num_kv in zip(parts[::2], parts[1::2], counts)
    )


def _pieces(rows: Sequence[ContextRow], begin: int, segment: int) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """-> (`Work.pieces` of the segment from `begin` on, where each row is among the gathered)"""
    found, places, place = list[tuple[int, ...]](), dict[int, int](), 0
    for row in rows:
        end = min(row.kv_len, begin + segment)
        places[row.row] = place
        found += ((row.row, at, min(PIECE, end - at), place + at - begin) for at in range(begin, end, PIECE))
        place = PIECE * len(found)
    return found, places


def _tiles(
    tiles: Sequence[tuple[ContextRow, int]], places: Mapping[int, int], begin: int, segment: int, tokens: int
) -> list[tuple[int, ...]]:
    """`Work.tiles` of the segment from `begin` on: those that see something of it."""
    found: list[tuple[int, ...]] = []
    for slot, (row, at) in enumerate(tiles):
        count = min(tokens, row.num_tokens - at)
        position = row.kv_len - row.num_tokens + at - begin
        length = position + count
        if length > 0:
            flags = BEGINS * (begin == 0) + ENDS * (length <= segment)
            found.append((row.first_token + at, count, places[row.row], position, min(length, segment), slot, flags))
    return found


def _pinned(numbers: NDArray[np.int32], device: torch.device) -> Tensor:
    """Where copies to the device don't wait for it."""
    host = torch.from_numpy(numbers)
    return host.pin_memory() if device.type == "cuda" else host


def carried_width(v_dim: int) -> int:
    """Numbers that a query and head carry from segment to segment: values in a whole tile, maximum and sum."""
    return max(16, 1 << (v_dim - 1).bit_length()) + 2
