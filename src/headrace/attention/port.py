"""The port of the attention room: what a backend is given, what it answers.

A backend takes the packed projection of a layer: it norms and turns the heads, writes the new K and V into the paged
cache and attends over it (a GPU does the first three in one kernel). It owns the layout of the cache (the engine only
allocates the shape it asks for) and whatever metadata it wants to compute once a step for all layers of a group
(`plan`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from headrace.kernels.quantise import PLAIN, Form, Quantised
from headrace.kernels.rope_write import Projected


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention is, fixed at load."""

    num_heads: int
    """On this rank."""
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Tokens a query sees, itself included; None is everything."""
    sink_tokens: int = 0
    """First tokens that a query sees beside its window."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap) before the softmax."""
    sinks: Tensor | None = None
    """[num_heads] a logit per head that takes part in the softmax's sum only."""
    k_scale: float = 1.0
    """An FP8 cache holds keys divided by this; caches of other types ignore it."""
    v_scale: float = 1.0


@dataclass(slots=True)
class AttentionStep:
    """The packed rows of one step, for the layers of one group."""

    block_size: int
    query_starts: Tensor  # [rows + 1] int32, offsets of the rows in the packed tokens
    kv_lens: Tensor  # [rows] int32, tokens in the cache once this step's are written
    positions: Tensor  # [tokens] int64
    block_tables: Tensor  # [rows, max_blocks] int32, entries past a row's last block are undefined
    write_slots: Tensor  # [tokens] int64, block * block_size + offset; block 0 is the dummy
    max_query: int
    max_kv: int
    """Host-side upper bounds of the row lengths."""
    num_context_rows: int
    """The first rows, which may have any number of tokens. Each of the others has exactly one."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """The backend's own metadata, filled by `plan`."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's paged KV: views into its group's pool, in the backend's layout."""

    k: Tensor
    v: Tensor


class AttentionBackend(Protocol):
    """One way to attend. Stateless between steps; one instance an engine."""

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of K (and of V) of one layer. Blocks come first: the engine copies them whole."""
        ...

    def plan(self, step: AttentionStep) -> None:
        """Compute once what all layers of the group share; may keep it in `step.scratch`."""
        ...

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        """Norm and turn the heads, write k and v at `step.write_slots`, attend causally.

        Args:
            packed: [tokens, (heads + 2 * kv_heads) * dim]; may be overwritten.
            form: what the output projection takes.

        Returns:
            [tokens, heads * dim] in that form; `plain` is in the projection's dtype.
        """
        ...
