"""What an attention kernel reads of a step and of a layer.

The attention room's `AttentionStep` and `AttentionSpec` have this shape; kernels stand below that room and
can't import it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PackedRows(Protocol):
    """The packed rows of one step and where their cached tokens are."""

    @property
    def block_size(self) -> int: ...
    @property
    def query_starts(self) -> Tensor: ...  # [rows + 1] int32
    @property
    def kv_lens(self) -> Tensor: ...  # [rows] int32
    @property
    def positions(self) -> Tensor: ...  # [tokens] int64
    @property
    def block_tables(self) -> Tensor: ...  # [rows, max_blocks] int32


class HeadsSpec(Protocol):
    """What one layer's attention is."""

    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def is_chunked(self) -> bool: ...
    @property
    def sink_tokens(self) -> int: ...
    @property
    def soft_cap(self) -> float | None: ...
    @property
    def sinks(self) -> Tensor | None: ...  # [heads]
    @property
    def k_scale(self) -> float: ...  # an FP8 cache holds keys divided by this
    @property
    def v_scale(self) -> float: ...


class StateRows(Protocol):
    """The packed rows of one step, for kernels that go on from a state (the layers room's `StateStep`)."""

    @property
    def slots(self) -> Tensor: ...  # [rows] int64, each row's place in the states
    @property
    def query_starts(self) -> Tensor: ...  # [rows + 1] int32
    @property
    def num_context_rows(self) -> int: ...  # the first rows; each of the others has one token
    @property
    def context_starts(self) -> tuple[int, ...]: ...  # [num_context_rows + 1] of query_starts, on the host
