"""Which prompts of a step attend over unfolded keys and values, and how much of that at a time: decided on the host.

The absorbed form multiplies a pair of tokens 2 * rank + rope_dim times a head, the unfolded one nope_dim + rope_dim +
v_dim times, once the row's context is unfolded: what pays is a prompt that is long enough for its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.attention._latent import LatentSpec
from headrace.kernels._unfolded_work import PIECE, ContextRow, carried_width

MAX_WORKSPACE_BYTES = 256 << 20
"""Of gathered vectors, unfolded keys and values, and what is carried: a ninth of what 8,192 absorbed queries of 128
heads and their results are."""
PRODUCT_TFLOP_S, ABSORBED_TFLOP_S, UNFOLDED_TFLOP_S = 600.0, 330.0, 480.0
"""Of an H200: products of keys' and values' functions, and both forms of attending (docs/performance.md)."""
TOKENS_A_TILE = 128
"""The unfolded form computes so many tokens of a row where there are fewer."""
MIN_SAVED_US = 20.0
"""Of a step's attention, for the kernels that unfolding launches."""
CAPTURE_SAVES_US = 100.0
"""What queueing the kernels of a layer takes a host, where no graph does it."""
PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are unfolded together."""

    rows: tuple[ContextRow, ...]
    group: int
    """Heads at a time."""
    segment: int | None = None
    """Keys of each row at a time; None is all."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a step's rows."""

    unfolded: tuple[Batch, ...]
    absorbed: tuple[tuple[int, int], ...]
    """[first, end) of rows, ascending; among them all that generate."""


def saved_us(num_tokens: int, kv_len: int, spec: LatentSpec) -> float:
    """What unfolding saves of a row's attention on an H200; below 0, what it costs.

    Args:
        kv_len: tokens in the cache, these included.
    """
    absorbed, unfolded = 2 * spec.rank + spec.rope_dim, spec.nope_dim + spec.rope_dim + spec.v_dim
    functions = (spec.nope_dim + spec.v_dim) * spec.rank
    padded = -(-num_tokens // TOKENS_A_TILE) * TOKENS_A_TILE
    saved = absorbed * _pairs(num_tokens, kv_len) / ABSORBED_TFLOP_S + functions * num_tokens / PRODUCT_TFLOP_S
    cost = unfolded * _pairs(padded, kv_len - num_tokens + padded) / UNFOLDED_TFLOP_S
    cost += functions * kv_len / PRODUCT_TFLOP_S
    return 2e-6 * spec.num_heads * (saved - cost)


def step_saves_us(rows: Sequence[tuple[int, int]], spec: LatentSpec) -> float:
    """What unfolding saves of a step. rows: (tokens, length in the cache) of each prompt."""
    if spec.window is not None or spec.index is not None:
        return 0.0
    return sum(max(saved_us(num_tokens, kv_len, spec), 0.0) for num_tokens, kv_len in rows)


def divide(
    context_rows: Sequence[tuple[int, int]] | None, spec: LatentSpec, *, num_rows: int, item_bytes: int
) -> Parts:
    """Who attends how.

    Args:
        context_rows: as `AttentionStep` has it.
        num_rows: of the step.
        item_bytes: of an unfolded element.
    """
    if context_rows is None or step_saves_us(context_rows, spec) < MIN_SAVED_US:
        return Parts((), ((0, num_rows),))
    chosen, first_token = list[ContextRow](), 0
    for row, (num_tokens, kv_len) in enumerate(context_rows):
        if saved_us(num_tokens, kv_len, spec) > 0.0:
            chosen.append(ContextRow(row, first_token, num_tokens, kv_len))
        first_token += num_tokens
    return Parts(batches(chosen, spec, item_bytes=item_bytes), _others({each.row for each in chosen}, num_rows))


def heads_that_fit(num_kv: int, spec: LatentSpec, item_bytes: int) -> int:
    """Of the workspace, beside the gathered vectors. num_kv: of these, more than 0."""
    elements = MAX_WORKSPACE_BYTES // item_bytes // num_kv - spec.rank - spec.rope_dim
    return min(max(elements // (spec.nope_dim + spec.v_dim), 0), spec.num_heads)


def batches(rows: Sequence[ContextRow], spec: LatentSpec, *, item_bytes: int) -> tuple[Batch, ...]:
    """Rows together as long as all heads fit; then only until there are programs for all processors."""
    found, members = list[Batch](), list[ContextRow]()
    num_kv = num_tiles = 0
    for row in rows:
        tiles = -(-row.num_tokens // TOKENS_A_TILE)
        row_kv = -(-row.kv_len // PIECE) * PIECE
        if members:
            fits = heads_that_fit(num_kv, spec, item_bytes)
            with_row = heads_that_fit(num_kv + row_kv, spec, item_bytes)
            fills = fits * num_tiles < min(PROCESSORS, with_row * (num_tiles + tiles))
            if with_row < spec.num_heads and not fills:
                found.append(_batch(members, num_kv, num_tiles, spec, item_bytes))
                members, num_kv, num_tiles = [], 0, 0
        members.append(row)
        num_kv, num_tiles = num_kv + row_kv, num_tiles + tiles
    if members:
        found.append(_batch(members, num_kv, num_tiles, spec, item_bytes))
    return tuple(found)


def _batch(rows: Sequence[ContextRow], num_kv: int, num_tiles: int, spec: LatentSpec, item_bytes: int) -> Batch:
    """Where so few heads fit that processors would be idle, they are more over a segment of the context at a time."""
    fits = heads_that_fit(num_kv, spec, item_bytes)
    if fits == spec.num_heads or fits * num_tiles >= PROCESSORS:
        return Batch(tuple(rows), group_of(fits, num_tiles, num_heads=spec.num_heads))
    group = group_of(-(-2 * PROCESSORS // num_tiles), num_tiles, num_heads=spec.num_heads)
    carried = num_tiles * TOKENS_A_TILE * group * carried_width(spec.v_dim) * 4
    vector_bytes = (spec.rank + spec.rope_dim + group * (spec.nope_dim + spec.v_dim)) * item_bytes
    segment = max(MAX_WORKSPACE_BYTES - carried, 0) // vector_bytes // len(rows)
    return Batch(tuple(rows), group, max(segment // PIECE, 1) * PIECE)


def group_of(most: int, num_tiles: int, *, num_heads: int) -> int:
    """Heads at a time, at most so many: tiles of all groups in the fewest rounds of the processors, which have a
    program each; then the fewest groups, and these of the same size."""

    def cost(group: int) -> tuple[int, int, int]:
        num_whole, rest = divmod(num_heads, group)
        rounds = num_whole * -(-group * num_tiles // PROCESSORS) + -(-rest * num_tiles // PROCESSORS)
        return rounds, num_whole + (rest > 0), group

    return min(range(1, min(most, num_heads) + 1), key=cost)


def _others(rows: set[int], num_rows: int) -> tuple[tuple[int, int], ...]:
    """Runs of the rows that are not among these."""
    found, first = list[tuple[int, int]](), 0
    for row in (*sorted(rows), num_rows):
        if first < row:
            found.append((first, row))
        first = row + 1
    return tuple(found)


def _pairs(num_tokens: int, kv_len: int) -> float:
    """Of a query and a token that it sees."""
    return num_tokens * (kv_len - num_tokens) + num_tokens * (num_tokens + 1) / 2
