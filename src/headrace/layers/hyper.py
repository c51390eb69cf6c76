"""Manifold-constrained hyper-connections (Xie et al. 2026): several residual streams, mixed by weights of their own.

A block sees a weighted sum of the streams. Its result is added to each of them with a weight, and the streams are
mixed among each other by a matrix whose rows and columns sum to one (Sinkhorn and Knopp 1967).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.layers.attention import AttentionBlock
from headrace.layers.experts import Experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hashed_experts import HashedExperts
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.norm import Norm
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act, ForwardStep, LiveState, Mixer, StateSpec
from headrace.layers.recurrent import RecurrentMixer, SmallWeights
from headrace.layers.weights import Slot

PARTS = ("fn", "base", "scale")


class StreamSizes(NamedTuple):
    """As a config states them."""

    hidden_size: int
    num_streams: int
    num_rounds: int
    """Of normalising rows and columns."""
    eps: float
    norm_eps: float

    @classmethod
    def of(cls, config: HfConfig, *, norm_eps: float) -> StreamSizes:
        return cls(
            hidden_size=config.integer("hidden_size"),
            num_streams=config.integer("hc_mult"),
            num_rounds=config.integer("hc_sinkhorn_iters"),
            eps=config.number("hc_eps"),
            norm_eps=config.number("rms_norm_eps", norm_eps),
        )


class Joint(NamedTuple):
    """How a block's result and the streams become the next streams."""

    post: Tensor  # [tokens, streams] float32
    comb: Tensor  # [tokens, streams, streams] float32, from the first to the second


class HyperConnection:
    """One block's weights, computed from the streams by a small layer in float32."""

    def __init__(self, weights: SmallWeights, sizes: StreamSizes) -> None:
        self.weights = weights
        self.sizes = sizes

    def open(self, streams: Tensor) -> tuple[Tensor, Joint]:
        """[tokens, streams, hidden] -> (what the block sees [tokens, hidden], how to go on)"""
        count, eps = self.sizes.num_streams, self.sizes.eps
        scale, base = self.weights["scale"], self.weights["base"]
        mixes = F.linear(unit_normed(streams.flatten(1), self.sizes.norm_eps), self.weights["fn"])
        pre, post, comb = mixes.split((count, count, count * count), -1)
        pre_base, post_base, comb_base = base.split((count, count, count * count))
        pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
        post = 2 * torch.sigmoid(post * scale[1] + post_base)
        comb = ((comb * scale[2] + comb_base).unflatten(-1, (count, count)).softmax(-1)) + eps
        comb = balanced(comb, rounds=self.sizes.num_rounds, eps=eps)
        return collapsed(pre, streams), Joint(post, comb)


class HyperHead:
    """The streams' weighted sum at the end."""

    def __init__(self, weights: SmallWeights, sizes: StreamSizes) -> None:
        self.weights = weights
        self.sizes = sizes

    def __call__(self, streams: Tensor) -> Tensor:
        """[tokens, streams, hidden] -> [tokens, hidden]"""
        mixes = F.linear(unit_normed(streams.flatten(1), self.sizes.norm_eps), self.weights["fn"])
        return collapsed(torch.sigmoid(mixes * self.weights["scale"] + self.weights["base"]) + self.sizes.eps, streams)


def unit_normed(x: Tensor, eps: float) -> Tensor:
    """[..., features] -> float32, an RMS norm without a weight"""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def collapsed(pre: Tensor, streams: Tensor) -> Tensor:
    """([tokens, streams] float32, [tokens, streams, hidden]) -> [tokens, hidden]"""
    return (pre.unsqueeze(-1) * streams).sum(1).to(streams.dtype)


def balanced(comb: Tensor, *, rounds: int, eps: float) -> Tensor:
    """[..., streams, streams] -> the same, its columns summing to one and its rows nearly so"""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def joined(joint: Joint, out: Tensor, streams: Tensor) -> Tensor:
    """out: [tokens, hidden], summed over ranks; streams: [tokens, streams, hidden] -> the next streams"""
    dtype = streams.dtype
    mixed = joint.comb.to(dtype).transpose(1, 2) @ streams
    return joint.post.to(dtype).unsqueeze(-1) * out.unsqueeze(1) + mixed


class Streams(NamedTuple):
    """What a layer carries from `before` to `after`."""

    inner: Any
    """What `mix` takes, then what it answers."""
    joint: Joint
    ids: Tensor  # [tokens] int64


class _HyperBase:
    """What both kinds of layers do but mixing tokens. Between layers travel the streams, and nothing is owed to them:
    the next weights depend on the whole sum."""

    def __init__(
        self,
        *,
        before_mix: HyperConnection,
        input_norm: Norm,
        before_mlp: HyperConnection,
        mlp_norm: Norm,
        mlp: Mlp | Experts | HashedExperts,
        parallel: ParallelContext,
    ) -> None:
        self.before_mix = before_mix
        self.input_norm = input_norm
        self.before_mlp = before_mlp
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.parallel = parallel
        mlp.feed_from(mlp_norm)

    def open(self, streams: Tensor) -> tuple[Act, Joint]:
        """-> (what the first block takes, how its result is joined)"""
        seen, joint = self.before_mix.open(streams)
        return self.input_norm(None, seen)[0], joint

    def close(self, partial: Tensor, mixed: Streams, streams: Tensor) -> tuple[None, Tensor]:
        """partial: of the first block. -> (nothing owed, the streams behind the MLP)"""
        reduce = self.parallel.collectives.all_reduce
        streams = joined(mixed.joint, reduce(partial), streams)
        seen, joint = self.before_mlp.open(streams)
        act = self.mlp_norm(None, seen)[0]
        out = self.mlp(act, mixed.ids) if isinstance(self.mlp, HashedExperts) else self.mlp(act)
        return None, joined(joint, reduce(out), streams)


class HyperLayer(_HyperBase):
    """A decoder layer with attention. Keywords as of its base."""

    def __init__(self, attention: AttentionBlock, **parts: Any) -> None:
        super().__init__(**parts)
        self.attention = attention
        attention.feed_from(self.input_norm)

    @property
    def spec(self) -> Any:
        return self.attention.spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Streams, Tensor]:
        assert partial is None, "streams are owed nothing"
        act, joint = self.open(residual)
        return Streams(self.attention.project(act, step), joint, step.ids), residual

    def mix(self, mixer_input: Streams, mixer: Mixer) -> Streams:
        return mixer_input._replace(inner=self.attention.attend(mixer_input.inner, mixer))

    def after(self, mixed: Streams, residual: Tensor) -> tuple[None, Tensor]:
        return self.close(self.attention.output(mixed.inner), mixed, residual)


class HyperRecurrentLayer(_HyperBase):
    """A decoder layer with a state. Keywords as of its base."""

    spec = None
    state: StateSpec

    def __init__(self, mixer: RecurrentMixer, **parts: Any) -> None:
        super().__init__(**parts)
        self.mixer = mixer
        self.state = mixer.state
        mixer.feed_from(self.input_norm)

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Streams, Tensor]:
        assert partial is None, "streams are owed nothing"
        act, joint = self.open(residual)
        return Streams(self.mixer.project(act), joint, step.ids), residual

    def mix(self, mixer_input: Streams, mixer: LiveState) -> Streams:
        return mixer_input._replace(inner=self.mixer.mix(mixer_input.inner, mixer))

    def after(self, mixed: Streams, residual: Tensor) -> tuple[None, Tensor]:
        return self.close(self.mixer.output(mixed.inner), mixed, residual)


def spread(hidden: Tensor, num_streams: int) -> Tensor:
    """[tokens, hidden] -> [tokens, streams, hidden], all the same"""
    return hidden.unsqueeze(1).expand(-1, num_streams, -1).contiguous()


def hyper_connection(factory: LayerFactory, name: str, sizes: StreamSizes) -> HyperConnection:
    """Parameters `{name}.fn`, `{name}.base` and `{name}.scale`."""
    outputs = (2 + sizes.num_streams) * sizes.num_streams
    return HyperConnection(_small(factory, name, sizes, outputs, 3), sizes)


def hyper_head(factory: LayerFactory, name: str, sizes: StreamSizes) -> HyperHead:
    """Parameters as of `hyper_connection`."""
    return HyperHead(_small(factory, name, sizes, sizes.num_streams, 1), sizes)


def _small(factory: LayerFactory, name: str, sizes: StreamSizes, outputs: int, scales: int) -> SmallWeights:
    shapes = {"fn": (outputs, sizes.num_streams * sizes.hidden_size), "base": (outputs,), "scale": (scales,)}
    weights = SmallWeights(
        name,
        {part: [Slot("", shapes[part])] for part in PARTS},
        dtypes=dict.fromkeys(PARTS, torch.float32),
        device=factory.device,
    )
    factory.modules.append(weights)
    return weights
