"""The port of the attention room: what a backend is given, what it answers.

A backend takes the packed projection of a layer: it norms and turns the heads, writes the new K and V into the paged
cache and attends over it (a GPU does the first three in one kernel). It owns the layout of the cache (the engine only
allocates the shapes it asks for) and whatever metadata it wants to compute once a step for all layers of a group
(`plan`).

There are kinds of attention. A kind has a spec (what one layer is), an input that the layer hands over, and backends
that compute it; the room's files say which kind they are for. Kind `heads`, below, keeps K and V by head: its files are
`torch` (the oracle), `cpu` and `triton`. Those of another kind are named after it: `latent_torch`, `latent_triton`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from headrace.kernels.quantise import PLAIN, Form, Quantised
from headrace.kernels.rope_write import Projected
from headrace.seam import Region


class CacheSpec(Protocol):
    """What the engine reads of a layer's attention, whatever its kind. A frozen dataclass."""

    kind: ClassVar[str]

    @property
    def window(self) -> int | None:
        """Tokens a query sees, itself included; None is everything."""
        ...

    @property
    def sink_tokens(self) -> int:
        """First tokens that a query sees beside its window."""
        ...

    def regions(self, dtype: str) -> tuple[Region, ...]:
        """What a layer keeps of each token. dtype: of the KV cache, as torch names it."""
        ...


@dataclass(frozen=True, slots=True)
class CachePart:
    """What a layer keeps of tokens over one reach."""

    regions: tuple[Region, ...]
    """Of each entry; names differ between a layer's parts."""
    window: int | None = None
    """Last tokens whose entries are read, the query's own included; None is everything."""
    every: int = 1
    """Tokens that share an entry. It is written when the last of them comes, and kept in that token's block at entry
    (offset in the block) // every: so it depends on nothing behind that block, as all that is kept does."""


@runtime_checkable
class PartedSpec(Protocol):
    """A `CacheSpec` whose parts reach back differently far, each in a layer group of its own. Its backend's `bind` is
    given the regions of all parts, its `run` a tuple of steps, one a part."""

    def parts(self, dtype: str) -> tuple[CachePart, ...]:
        """dtype: of the KV cache, as torch names it."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention over heads is, fixed at load."""

    kind: ClassVar[str] = "heads"
    num_heads: int
    """On this rank."""
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Tokens a query sees, itself included; None is everything."""
    is_chunked: bool = False
    """The window is a chunk: a query sees the tokens since the last multiple of it, not all of the last ones."""
    sink_tokens: int = 0
    """First tokens that a query sees beside its window."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap) before the softmax."""
    sinks: Tensor | None = None
    """[num_heads] a logit per head that takes part in the softmax's sum only."""
    k_scale: float = 1.0
    """An FP8 cache holds keys divided by this; caches of other types ignore it."""
    v_scale: float = 1.0
    source: int | None = None
    """The earlier layer whose keys and values this one attends to: it keeps none, and writes that layer's again."""

    def regions(self, dtype: str) -> tuple[Region, ...]:
        shape = (self.num_kv_heads, self.head_dim)
        return Region("k", shape, dtype), Region("v", shape, dtype)


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
    context_rows: tuple[tuple[int, int], ...] | None = None
    """(tokens, length in the cache once they are written) of each context row, on the host, for kernels that are
    scheduled there. None where only the device knows: in a step that becomes a graph."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """The backend's own metadata, filled by `plan`."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's paged K and V: views into its group's pool, in the backend's layout."""

    k: Tensor
    v: Tensor


class AttentionBackend(Protocol):
    """One way to attend. Stateless between steps; one instance an engine. Written for kind `heads`; other kinds have
    a cache, a spec and an input of their own."""

    kind: ClassVar[str]

    def block_shape(self, shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
        """How a block lays out a region of this shape a token. [blocks, *this] is what `bind` is given."""
        ...

    def bind(self, regions: Mapping[str, Tensor]) -> Any:
        """One layer's regions by name -> the cache that `run` takes."""
        ...

    def plan(self, step: AttentionStep) -> None:
        """Compute once what all layers of the group share; may keep it in `step.scratch`."""
        ...

    def wants_lengths(self, context_rows: Sequence[tuple[int, int]], spec: Any) -> bool:
        """Whether a step with these prompts should not be a graph: with their lengths known on the host the layer is so
        much faster. context_rows: as `AttentionStep` has it."""
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
