"""The time of a step from what it computes: operations and bytes against the device's rates, corrected by measurement.

A step takes

    overhead + correction(tokens) x linear + attention correction x attention + collectives

where linear and attention are rooflines (Williams et al., 2009): the larger of operations / rate and bytes / rate.
Without a calibration the corrections are what well-tuned kernels reach of their peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.hub.config import text_config
from headrace.hub.keys import Keys
from headrace.hub.rank_share import DTYPE_BITS, Ranks, ceil_share, local_count
from headrace.hub.shape import (
    AttentionShape,
    LatentShape,
    MixerShape,
    ModelShape,
    PartedShape,
    RecurrentShape,
    Storage,
)
from headrace.seam import GroupSpec
from headrace.simulate.devices import Peak
from headrace.simulate.work import Work

COLLECTIVE_LATENCY_S = 8e-6
FP8_BITS = 8.1
"""Up to here a weight's products run at the rate of FP8, where a device has it."""

Seconds = float | NDArray[np.float64]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What measurement says of the rooflines. The defaults are estimates for a GPU."""

    knots: tuple[tuple[float, float], ...] = ((1.0, 1.4),)
    """(tokens of a step, factor on its linear part): between them linear in log2(tokens), beyond them constant."""
    attention: float = 1.6
    overhead_s: float = 0.0005
    """Of each step, on the device."""
    host_s: float = 0.0005
    """To plan and to commit; hidden behind the device's time where plans overlap."""
    source: str = ""
    """What it was measured on; "" is an estimate."""
    error: float | None = None
    """Mean over the measured steps of |modelled - measured| / measured."""
    generation_spread: tuple[float, ...] = ()
    """Quantiles of measured / modelled, of steps that only generate; none: they don't vary."""
    context_spread: tuple[float, ...] = ()
    """The same of steps that compute prompts."""

    def without_spread(self) -> Calibration:
        return msgspec.structs.replace(self, generation_spread=(), context_spread=())

    def factor(self, num_tokens: int) -> float:
        places = [float(np.log2(tokens)) for tokens, _ in self.knots]
        return float(np.interp(np.log2(max(num_tokens, 1)), places, [factor for _, factor in self.knots]))


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Products with weights, on one rank."""

    flops: float
    """A token, the head not included."""
    bytes: float
    """Of all weights that every step reads, the head included."""
    head_flops: float
    """A sampled token."""
    expert_bytes: float = 0.0
    """Of all routed experts."""
    expert_share: float = 0.0
    """Of the experts, how many a token is sent to."""

    def seconds(self, work: Work, peak: Peak) -> float:
        if not work.num_tokens:
            return 0.0
        flops = self.flops * work.num_tokens + self.head_flops * work.num_sampled
        used = 1 - (1 - self.expert_share) ** work.num_tokens  # of the experts, if tokens chose at random
        return max(flops / peak.flops, (self.bytes + self.expert_bytes * used) / peak.bytes_per_s)


@dataclass(frozen=True, slots=True)
class CachePart:
    """One layer group on one rank."""

    flops: float
    """A (query, key) pair, over all layers of the group; of a recurrent group, a token."""
    bytes: float
    """Of a token's keys and values, over all layers; of a recurrent group, a state read and written."""
    top: int = 0
    """Tokens that an indexer chooses for a query; what follows is of those alone."""
    chosen_flops: float = 0.0
    chosen_bytes: float = 0.0
    unfolded_flops: float = 0.0
    """A pair's where keys and values are unfolded from latents first; 0: they can't be."""
    unfolding_flops: float = 0.0
    """To unfold a token that this step didn't compute; of its own, the linear part has them."""

    def seconds(self, num_queries: int, pairs: Any, reads: Any, peak: Peak) -> Any:
        computing, reading = pairs * self.flops, reads * self.bytes
        if self.unfolded_flops:
            unfolded = pairs * self.unfolded_flops + (reads - num_queries) * self.unfolding_flops
            computing = np.minimum(computing, unfolded)
        if self.top:
            most = num_queries * self.top
            computing = computing + np.minimum(pairs, most) * self.chosen_flops
            reading = reading + np.minimum(reads, most) * self.chosen_bytes
        computing, reading = computing / peak.flops, reading / peak.bytes_per_s
        return max(computing, reading) if isinstance(computing, float) else np.maximum(computing, reading)


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a step on one instance; its ranks are alike and work together."""

    linear: LinearPart
    caches: tuple[CachePart, ...]
    collective_bytes: float
    """A token, over all layers, that each rank sends."""
    num_collectives: int
    peak: Peak
    calibration: Calibration
    _fixed_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float], compare=False)
    """By tokens and samples of a step: its time without attention, where it has been asked for."""

    def linear_s(self, work: Work) -> float:
        return self.linear.seconds(work, self.peak)

    def attention_s(self, work: Work) -> Seconds:
        total: Any = 0.0
        for part, pairs, reads in zip(self.caches, work.pairs, work.reads, strict=True):
            total = total + part.seconds(work.num_tokens, pairs, reads, self.peak)
        return total

    def seconds(self, work: Work) -> Seconds:
        """One value a step: the same for a step of a run as for the step by itself."""
        if not work.num_rows:
            return 0.0
        size = work.num_tokens, work.num_sampled
        fixed_s = self._fixed_s.get(size)
        if fixed_s is None:
            said = self.calibration
            fixed_s = said.overhead_s + said.factor(work.num_tokens) * self.linear_s(work) + self._collectives_s(work)
            self._fixed_s[size] = fixed_s
        return fixed_s + self.calibration.attention * self.attention_s(work)

    def _collectives_s(self, work: Work) -> float:
        if not self.num_collectives:
            return 0.0
        sent_s = self.collective_bytes * work.num_tokens / self.peak.link_bytes_per_s
        return self.num_collectives * COLLECTIVE_LATENCY_S + sent_s


def cost_of(
    shape: ModelShape,
    config: Mapping[str, Any],
    *,
    groups: Sequence[GroupSpec],
    ranks: Ranks,
    storage: Storage,
    dtype: str,
    peak: Peak,
    calibration: Calibration,
) -> Cost:
    """Counts of a model on one pipeline stage of these ranks.

    Args:
        config: as `read_config` gives it, for how many experts a token is sent to.
        groups: the layer groups of a rank, in the order of a plan.
        dtype: of what is not quantised.
    """
    bits = int(DTYPE_BITS[dtype])
    num_collectives = 2 * len(shape.layers) if ranks.tensor > 1 else 0
    ring = 2 * (ranks.tensor - 1) / ranks.tensor
    return Cost(
        linear=_linear(shape, config, ranks, storage, bits, peak),
        caches=tuple(_cache_part(shape, group, ranks) for group in groups),
        collective_bytes=num_collectives * ring * shape.hidden_size * bits / 8,
        num_collectives=num_collectives,
        peak=peak,
        calibration=calibration,
    )


def _linear(
    shape: ModelShape, config: Mapping[str, Any], ranks: Ranks, storage: Storage, bits: int, peak: Peak
) -> LinearPart:
    flops = num_bytes = expert_bytes = 0.0
    share = _expert_share(config)
    for layer in shape.layers:
        for weight in layer.weights:
            count, stored = local_count(weight, ranks), storage.bits_of(weight.form, bits)
            rate = 0.5 if peak.has_fp8 and stored <= FP8_BITS else 1.0
            if weight.split == "experts":
                flops += 2 * count * share * rate
                expert_bytes += count * stored / 8
            else:
                flops += 2 * count * rate
                num_bytes += count * stored / 8
    head = ceil_share(shape.vocab_size, ranks.attention) * shape.hidden_size
    return LinearPart(flops, num_bytes + head * bits / 8, 2.0 * head, expert_bytes, share)


def _expert_share(config: Mapping[str, Any]) -> float:
    keys = Keys(text_config(config), "config.json")
    count = keys.number("n_routed_experts", "num_local_experts", "num_experts", default=0)
    chosen = keys.number("num_experts_per_tok", "num_experts_per_token", "moe_topk", default=1)
    return min(chosen / count, 1.0) if count else 0.0


def _cache_part(shape: ModelShape, group: GroupSpec, ranks: Ranks) -> CachePart:
    """Of the group's layers, and of those that attend to what these keep."""
    if group.is_recurrent:
        mixers = [shape.layers[layer].mixer for layer in group.layers]
        states = sum(mixer.state_count for mixer in mixers if isinstance(mixer, RecurrentShape))
        return CachePart(6.0 * states / ranks.attention, 2.0 * group.state_bytes)
    parts = [_layer_part(shape.layers[layer].mixer, group, ranks) for layer in group.layers]
    parts += [
        _layer_part(layer.mixer, group, ranks)
        for layer in shape.layers
        if isinstance(layer.mixer, AttentionShape) and layer.mixer.is_shared and layer.source in group.layers
    ]
    return CachePart(
        flops=sum(part.flops for part in parts),
        bytes=sum(part.bytes for part in parts),
        top=parts[0].top,
        chosen_flops=sum(part.chosen_flops for part in parts),
        chosen_bytes=sum(part.chosen_bytes for part in parts),
        unfolded_flops=sum(part.unfolded_flops for part in parts),
        unfolding_flops=sum(part.unfolding_flops for part in parts),
    )


def _layer_part(mixer: MixerShape | None, group: GroupSpec, ranks: Ranks) -> CachePart:
    """One layer of an attention group; what a token has is counted where entries are shared by several."""
    token_bytes = group.bytes_per_token / len(group.layers)
    if isinstance(mixer, PartedShape):
        names = [region.name for region in group.regions]
        (part,) = [part for part in mixer.parts if [name for name, _ in part.regions] == names]
        widths = {region.name: region.shape[-1] for region in group.regions}
        index = sum(width for name, width in widths.items() if name.startswith("index_")) / sum(widths.values())
        return _chosen(
            top=(part.top or 0) * part.every,
            flops=(part.own_ops / part.every, part.head_ops / part.every / ranks.attention),
            num_bytes=(index * token_bytes, (1 - index) * token_bytes),
        )
    if isinstance(mixer, LatentShape):
        width = mixer.latent_dim + mixer.rope_dim + mixer.index_dim
        index = mixer.index_dim / width
        heads = 2.0 * mixer.num_heads / ranks.attention
        part = _chosen(
            top=mixer.top or 0,
            flops=(2.0 * mixer.index_heads * mixer.index_dim, heads * (2 * mixer.latent_dim + mixer.rope_dim)),
            num_bytes=(index * token_bytes, (1 - index) * token_bytes),
        )
        if mixer.top or mixer.index_dim:
            return part
        made = mixer.nope_dim + mixer.value_dim
        return replace(
            part, unfolded_flops=heads * (made + mixer.rope_dim), unfolding_flops=heads * made * mixer.latent_dim
        )
    assert isinstance(mixer, AttentionShape), mixer
    return CachePart(4.0 * mixer.num_heads * mixer.head_dim / ranks.attention, token_bytes)


def _chosen(*, top: int, flops: tuple[float, float], num_bytes: tuple[float, float]) -> CachePart:
    """flops, num_bytes: of every token, and of those that are chosen."""
    if not top:
        return CachePart(sum(flops), sum(num_bytes))
    return CachePart(flops[0], num_bytes[0], top, flops[1], num_bytes[1])
