"""What a model is made of, in numbers: enough to tell what its weights and its cache take, without either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["whole", "heads", "kv_heads", "dense", "experts", "vocab"]
"""How a weight is dealt to ranks: not at all, by attention heads or their KV heads, by the features of an MLP, by
experts (and their features), by rows of the vocabulary."""

Form = Literal["plain", "linear", "expert", "float32"]
"""What quantisation does to a weight: nothing, as linears, as routed experts, nothing and never fewer bits."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of one layer, or several that are treated alike."""

    count: int
    """Elements in the whole model."""
    split: Split = "whole"
    units: int = 1
    """What is dealt: heads, features, experts, rows. Each has count / units elements."""
    form: Form = "linear"
    kv_heads: int = 0
    """With `heads`: query heads stay with the KV head that they read."""
    features: int = 1
    """With `experts`: what each expert may be cut by as well."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Keys and values by head: MHA, GQA, MQA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens a query sees, itself included; None is everything."""
    index_dim: int = 0
    """Features of the key that an indexer of sparse attention keeps beside, in the dtype of the cache."""
    is_shared: bool = False
    """It attends to what an earlier layer keeps, and keeps nothing."""

    @property
    def kind(self) -> str:
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-AI 2024): one latent and one rotated key of a token, for all heads."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    """Of a head's keys, those that come of the latent."""
    value_dim: int
    index_dim: int = 0
    """As of `AttentionShape`."""
    kind: str = "MLA"
    index_heads: int = 0
    """Of the indexer, which no rank divides."""
    top: int | None = None
    """Tokens that a query sees of those before it, chosen here or by an earlier layer; None is all."""


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A state of constant size in place of keys and values."""

    num_heads: int
    """Over which the state is dealt to ranks."""
    state_count: int
    """Elements of the recurrent state."""
    conv_count: int
    """Elements of the short convolution's state that are dealt with the heads, in the dtype of the activations."""
    kind: str = "recurrent"
    num_groups: int = 1
    """Heads of a group stay together where there are enough groups for the ranks."""
    group_conv_count: int = 0
    """Elements of the convolution's state that are dealt with the groups."""


@dataclass(frozen=True, slots=True)
class PartShape:
    """A part of what a layer keeps of tokens; every rank keeps all of it."""

    regions: tuple[tuple[str, int], ...]
    """Names, and the features of an entry."""
    window: int | None = None
    """Tokens that are read back; None is everything."""
    every: int = 1
    """Tokens that share an entry."""
    is_exact: bool = False
    """An eight-bit cache holds it in bfloat16."""
    head_ops: int = 0
    """Multiplications and additions of a query with an entry, over all heads, which ranks divide."""
    own_ops: int = 0
    """Those that each rank does: of an indexer, of a compressor."""
    top: int | None = None
    """Entries that heads read of those before a query, chosen by an indexer; None is all."""


@dataclass(frozen=True, slots=True)
class PartedShape:
    """Attention whose cache has parts that reach back differently far, each a layer group."""

    kind: str
    """Of attention, as the engine names it."""
    num_heads: int
    num_groups: int
    """Of heads, which no rank divides."""
    parts: tuple[PartShape, ...]


MixerShape = AttentionShape | LatentShape | RecurrentShape | PartedShape


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: how it mixes tokens (None: not at all), and its weights."""

    mixer: MixerShape | None
    weights: tuple[Weight, ...]
    source: int | None = None
    """An earlier layer from which it takes over more than the residual: whose keys and values it attends to, whose
    choice of tokens it uses, whose other half it is."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bits of a stored element by form, scales included; `plain` is the dtype of the activations."""

    name: str
    bits: Mapping[Form, float] = field(default_factory=dict[Form, float])

    def bits_of(self, form: Form, plain_bits: int) -> float:
        if form == "float32":
            return 32
        return self.bits.get(form, plain_bits)


PLAIN = Storage("plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as its config describes it."""

    model_type: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerShape, ...]
    dtype: str
    """Of the checkpoint's activations."""
    state_dtype: str = ""
    """Of recurrent states, where the config says; "" is that of the activations."""
    is_tied: bool = False
    """The head is the embedding."""
    intermediate_size: int = 0
    """Features of the widest MLP that a token runs through."""
    norm_size: int = 0
    """Elements of the last norm."""
    storage: Storage = PLAIN
    """As the checkpoint stores its weights."""
    parts_per_layer: int = 1
    """Entries of `layers` that are one layer of the checkpoint."""
    is_known: bool = True
    """Whether the model type has rules of its own here; else its keys were read as most models mean them."""

    @property
    def num_parameters(self) -> int:
        """A tied head counts once."""
        ends = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2) + self.norm_size
        return ends + sum(weight.count for layer in self.layers for weight in layer.weights)


def activation_bytes(hidden_size: int, intermediate_size: int, *, max_num_tokens: int, item_bytes: int) -> int:
    """An upper bound of what one full step holds: the widest MLP's input and output, and the residual."""
    return max_num_tokens * (2 * intermediate_size + 6 * hidden_size) * item_bytes


GRAPH_BYTES = 10 << 20
"""About what one captured batch size takes besides its tensors, which all sizes share."""


def logits_bytes(vocab_size: int, *, num_rows: int, item_bytes: int) -> int:
    """Of a step's rows on a GPU: as the head gives them, and in float32 with their rules applied."""
    return num_rows * vocab_size * (item_bytes + 4)


def graph_bytes(sizes: Sequence[int], *, vocab_size: int, step_bytes: int, item_bytes: int) -> int:
    """An upper bound of what captured steps keep.

    Args:
        sizes: rows of each.
        step_bytes: `activation_bytes` of a step of the largest.
    """
    if not sizes:
        return 0
    # Of rows that are drawn a second graph, and their raw logits for log-probabilities.
    rows = logits_bytes(vocab_size, num_rows=max(sizes), item_bytes=2 * item_bytes)
    return 2 * GRAPH_BYTES * len(sizes) + step_bytes + rows
