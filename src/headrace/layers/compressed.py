"""Attention over a window and compressed tokens (DeepSeek-V4, DeepSeek-AI 2026): everything but attending.

One key for all heads is the value too, so what attending yields is turned back by the query's angle. Heads are
projected by groups, then together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.attention._compressed import (
    CompressedProjected,
    CompressedSpec,
    EntryIndexSpec,
    EntryQuery,
    Loose,
    PoolSpec,
)
from headrace.kernels.quantise import PLAIN, quantise
from headrace.kernels.rope import turn_last
from headrace.layers.factory import LayerFactory
from headrace.layers.heads import Sinks, UnitNorm
from headrace.layers.linear import Linear, Output, column_linear
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, Mixer
from headrace.layers.recurrent import SmallWeights
from headrace.layers.weights import Parameter, Part, Slot

WINDOW_ROPE, ENTRY_ROPE = "window", "entries"
"""Rope of layers that see their window alone, and of those with entries."""


def first_of_entry(every: int) -> str:
    """The rope kind of the first token of the entry that a token is in."""
    return f"{ENTRY_ROPE} of {every}"


@dataclass(frozen=True, slots=True)
class CompressedSizes:
    """As a config states them; heads are the whole model's."""

    hidden_size: int
    num_heads: int
    dim: int
    q_rank: int
    window: int
    num_groups: int
    """Of heads that are projected together."""
    out_rank: int
    """Features that each group is projected to."""
    eps: float


class Compressor:
    """What entries are made of. Plain in every checkpoint, and computed whole by every rank."""

    def __init__(self, loose: Linear, small: SmallWeights, spec: PoolSpec, eps: float) -> None:
        """loose: to a token's vectors and to their gates."""
        self.loose = loose
        self.small = small
        self.spec = spec
        self.eps = eps

    def project(self, act: Act) -> Loose:
        """[tokens, hidden] -> what entries are made of"""
        values, gates = self.loose(act).chunk(2, -1)
        return Loose(values, gates, self.small["bias"], self.small["norm"], self.eps)


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """Chooses entries, by compressed keys of its own."""

    compressor: Compressor
    q: Linear
    weights: Linear
    spec: EntryIndexSpec


class GroupedLinear:
    """A linear by groups of inputs: rows [group, rank] of its weight take the features of their group only."""

    def __init__(self, linear: Linear, *, num_groups: int) -> None:
        self.linear = linear
        self.num_groups = num_groups
        self._weight: Tensor | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.linear.parameters

    def finish(self) -> None:
        self.linear.finish()
        self._weight = self.linear.take_plain().unflatten(0, (self.num_groups, -1)).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, groups * features] -> [tokens, groups * rank]"""
        assert self._weight is not None, f"{self.linear.name} is not loaded"
        parts = x.unflatten(1, (self.num_groups, -1)).transpose(0, 1)
        return torch.bmm(parts, self._weight).transpose(0, 1).flatten(1)


class CompressedAttention:
    """The projections around attending. `down` yields what queries are made of and the key, in one product."""

    def __init__(
        self,
        *,
        down: Linear,
        q_norm: Norm,
        q: Linear,
        head_norm: UnitNorm,
        key_norm: Norm,
        sinks: Sinks,
        out_groups: GroupedLinear,
        out: Linear,
        spec: CompressedSpec,
        compressor: Compressor | None,
        indexer: EntryIndexer | None,
    ) -> None:
        self.down = down
        self.q_norm = q_norm
        self.q = q
        self.head_norm = head_norm
        self.key_norm = key_norm
        self.out_groups = out_groups
        self.out = out
        self.compressor = compressor
        self.indexer = indexer
        self._sinks = sinks
        self._spec = spec
        if indexer is None:
            q_norm.feed(q)

    @property
    def spec(self) -> CompressedSpec:
        """With the checkpoint's sinks once it is loaded."""
        if self._spec.sinks is None and self._sinks.logits is not None:
            self._spec = replace(self._spec, sinks=self._sinks.logits)
        return self._spec

    def feed_from(self, norm: Norm) -> None:
        """Several products take what the norm yields, but in a layer that sees its window alone."""
        if self.compressor is None:
            norm.feed(self.down)

    def project(self, act: Act, step: ForwardStep) -> CompressedProjected:
        spec = self._spec
        parts = self.down(act)
        q_act = self.q_norm(None, parts[:, : -spec.dim].contiguous())[0]
        keys = self.key_norm(None, parts[:, -spec.dim :].contiguous())[0].data[:, None]
        rope = step.ropes[WINDOW_ROPE if self.compressor is None else ENTRY_ROPE]
        q = self.head_norm(self.q(q_act).unflatten(-1, (spec.num_heads, spec.dim)))
        packed = CompressedProjected(
            turn_last(q, rope.cos, rope.sin), turn_last(keys, rope.cos, rope.sin)[:, 0], rope.cos, rope.sin
        )
        if self.compressor is None:
            return packed
        first = step.ropes[first_of_entry(self.compressor.spec.every)]
        packed = replace(packed, loose=self.compressor.project(act), entry_cos=first.cos, entry_sin=first.sin)
        if self.indexer is None:
            return packed
        indexer, index = self.indexer, self.indexer.spec
        asked = turn_last(indexer.q(q_act).unflatten(-1, (index.num_heads, index.pool.dim)), rope.cos, rope.sin)
        weights = indexer.weights(act).float() * index.num_heads**-0.5
        return replace(packed, index_loose=indexer.compressor.project(act), index=EntryQuery(asked, weights))

    def attend(self, mixer_input: CompressedProjected, mixer: Mixer) -> Act:
        """The values, turned as their keys are, come back as seen from the query."""
        mixed = mixer(mixer_input, PLAIN).data.unflatten(1, (self._spec.num_heads, self._spec.dim))
        return Act(turn_last(mixed, mixer_input.cos, -mixer_input.sin).flatten(1))

    def output(self, mixed: Act) -> Tensor:
        """[tokens, heads * dim] -> [tokens, hidden], partial"""
        return self.out(quantise(self.out_groups(mixed.data), self.out.wanted))


def compressor(factory: LayerFactory, name: str, *, hidden_size: int, spec: PoolSpec, eps: float) -> Compressor:
    """Modules `{name}.loose` (slots values, gates), `{name}.bias` and `{name}.norm`."""
    loose = column_linear(
        f"{name}.loose", hidden_size, [Output(slot, spec.width, (0, spec.width)) for slot in ("values", "gates")],
        bias=False, recipe=factory.plain, dtype=factory.dtype, device=factory.device,
    )  # fmt: skip
    small = SmallWeights(
        name,
        {"bias": [Slot("", (spec.every, spec.width))], "norm": [Slot("", (spec.dim,))]},
        dtypes={"bias": torch.float32, "norm": factory.dtype},
        device=factory.device,
    )
    factory.modules += [loose, small]
    return Compressor(loose, small, spec, eps)


def entry_indexer(
    factory: LayerFactory, name: str, *, hidden_size: int, q_rank: int, spec: EntryIndexSpec, eps: float
) -> EntryIndexer:
    """Modules `{name}.q`, `{name}.weights`, which is plain in every checkpoint, and those of `compressor`."""
    return EntryIndexer(
        compressor(factory, name, hidden_size=hidden_size, spec=spec.pool, eps=eps),
        factory.linear(f"{name}.q", q_rank, spec.num_heads * spec.pool.dim),
        factory.plain_linear(f"{name}.weights", hidden_size, spec.num_heads),
        spec,
    )


def compressed_attention(
    factory: LayerFactory,
    name: str,
    sizes: CompressedSizes,
    *,
    pool: PoolSpec | None,
    index: EntryIndexSpec | None,
) -> CompressedAttention:
    """Modules `{name}.down` (slots q, key), `{name}.q_norm`, `{name}.q`, `{name}.key_norm`, `{name}.sinks`,
    `{name}.out_groups`, `{name}.out`, and where there are such those of `{name}.compressor` and `{name}.indexer`.

    Raises:
        ValueError: a rank would hold no whole group of heads.
    """
    groups, inside = sizes.num_groups, sizes.num_heads // sizes.num_groups
    if factory.parallel.size > groups:
        raise ValueError(
            f"tensor_parallel_size {factory.parallel.size} is too large for {groups} groups of heads (o_groups):"
            f" use at most {groups}"
        )
    heads = factory.parallel.heads(sizes.num_heads, groups)
    features = (heads.q[0] * sizes.dim, heads.q[1] * sizes.dim)
    by_group = (heads.kv[0] * sizes.out_rank, heads.kv[1] * sizes.out_rank)
    down = [Output(slot, size, (0, size)) for slot, size in (("q", sizes.q_rank), ("key", sizes.dim))]
    slot = Slot("", (sizes.num_heads,), Part(0, *heads.q))
    sinks = Sinks(f"{name}.sinks", slot=slot, dtype=torch.float32, device=factory.device)
    factory.modules.append(sinks)
    return CompressedAttention(
        down=factory.column(f"{name}.down", sizes.hidden_size, down, bias=False),
        q_norm=factory.norm(f"{name}.q_norm", sizes.q_rank, eps=sizes.eps),
        q=factory.column(f"{name}.q", sizes.q_rank, [Output("", sizes.num_heads * sizes.dim, features)], bias=False),
        head_norm=factory.unit_norm(sizes.dim, eps=sizes.eps),
        key_norm=factory.norm(f"{name}.key_norm", sizes.dim, eps=sizes.eps),
        sinks=sinks,
        out_groups=_by_groups(
            factory, f"{name}.out_groups", inside * sizes.dim,
            [Output("", groups * sizes.out_rank, by_group)], num_groups=heads.num_kv_heads,
        ),
        out=factory.row(f"{name}.out", groups * sizes.out_rank, sizes.hidden_size, share=by_group, bias=False),
        spec=CompressedSpec(
            num_heads=heads.num_heads,
            dim=sizes.dim,
            scale=sizes.dim**-0.5,
            window=sizes.window,
            pool=pool,
            index=index,
        ),
        compressor=None
        if pool is None
        else compressor(factory, f"{name}.compressor", hidden_size=sizes.hidden_size, spec=pool, eps=sizes.eps),
        indexer=None
        if index is None
        else entry_indexer(
            factory, f"{name}.indexer",
            hidden_size=sizes.hidden_size, q_rank=sizes.q_rank, spec=index, eps=sizes.eps,
        ),
    )  # fmt: skip


def _by_groups(
    factory: LayerFactory, name: str, in_features: int, outputs: Sequence[Output], *, num_groups: int
) -> GroupedLinear:
    """num_groups: of this rank."""
    linear = column_linear(
        name, in_features, outputs,
        bias=False, recipe=factory.recipe_of(name, [out.name for out in outputs]), dtype=factory.dtype,
        device=factory.device,
    )  # fmt: skip
    grouped = GroupedLinear(linear, num_groups=num_groups)
    factory.modules.append(grouped)
    return grouped
