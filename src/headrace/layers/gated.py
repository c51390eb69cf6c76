"""Attention whose result is gated by the token itself (Qiu et al. 2025): each query head is projected with a gate, or
(latent attention of Kimi-K3) a product of its own makes the gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.quantise import PLAIN
from headrace.layers.attention import Attention, KvScales
from headrace.layers.factory import LayerFactory
from headrace.layers.latent import LatentAttention, LatentSizes
from headrace.layers.linear import Linear, Output
from headrace.layers.norm import HeadNorm, Norm
from headrace.layers.port import Act, AttentionSpec, ForwardStep, Mixer, Projected


class GatedAttention(Attention):
    """The packed projection has (query, gate) of each head in turn, then keys and values."""

    def project(self, act: Act, step: ForwardStep) -> tuple[Projected, Tensor]:
        """[tokens, hidden] -> (the packed heads, gates [tokens, heads * dim])"""
        packed = self.qkv(act)
        width = self.spec.num_heads * self.spec.head_dim
        q, gate = packed[:, : 2 * width].unflatten(-1, (self.spec.num_heads, -1)).chunk(2, -1)
        heads = torch.cat((q.flatten(1), packed[:, 2 * width :]), -1)
        return self.ready(heads, step), gate.flatten(1)

    def attend(self, mixer_input: tuple[Projected, Tensor], mixer: Mixer) -> Act:
        packed, gate = mixer_input
        return Act(mixer(packed, PLAIN).data * torch.sigmoid(gate))


def gated_attention(
    factory: LayerFactory,
    name: str,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: str,
    bias: bool,
    q_norm: HeadNorm,
    k_norm: HeadNorm,
) -> GatedAttention:
    """Modules `{name}.qkv` (slots q, of query and gate by head, k, v) and `{name}.out`. Heads are the whole model's."""
    heads = factory.parallel.heads(num_heads, num_kv_heads)

    def output(slot: str, count: int, share: tuple[int, int], dim: int) -> Output:
        return Output(slot, count * dim, (share[0] * dim, share[1] * dim))

    outputs = [
        output("q", num_heads, heads.q, 2 * head_dim),
        output("k", num_kv_heads, heads.kv, head_dim),
        output("v", num_kv_heads, heads.kv, head_dim),
    ]
    kv_scales = KvScales(f"{name}.qkv", device=factory.device)
    factory.modules.append(kv_scales)
    share = (heads.q[0] * head_dim, heads.q[1] * head_dim)
    return GatedAttention(
        factory.column(f"{name}.qkv", hidden_size, outputs, bias=bias),
        factory.row(f"{name}.out", num_heads * head_dim, hidden_size, share=share, bias=bias),
        spec=AttentionSpec(
            num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5
        ),
        rope=rope,
        kv_scales=kv_scales,
        q_norm=q_norm,
        k_norm=k_norm,
    )


class GatedLatent:
    """Latent attention whose result is multiplied with a sigmoid by feature of each head."""

    def __init__(self, latent: LatentAttention, gate: Linear) -> None:
        self.latent = latent
        self.gate = gate

    @property
    def spec(self) -> Any:
        return self.latent.spec

    def feed_from(self, norm: Norm) -> None:
        """Two products take what the norm yields, so it stays plain."""

    def project(self, act: Act, step: ForwardStep) -> tuple[Any, Tensor]:
        """[tokens, hidden] -> (what attention takes, gates [tokens, heads * v_dim])"""
        return self.latent.project(act, step), self.gate(act)

    def attend(self, mixer_input: tuple[Any, Tensor], mixer: Mixer) -> Act:
        projected, gate = mixer_input
        return Act(mixer(projected, PLAIN).data * torch.sigmoid(gate))

    def output(self, mixed: Act) -> Tensor:
        """[tokens, heads * v_dim] -> [tokens, hidden], partial"""
        return self.latent.output(mixed)


def gated_latent(
    factory: LayerFactory, name: str, latent: LatentAttention, *, hidden_size: int, sizes: LatentSizes
) -> GatedLatent:
    """Module `{name}.gate`, beside those of the latent attention."""
    heads = factory.parallel.heads(sizes.num_heads, sizes.num_heads)
    share = (heads.q[0] * sizes.v_dim, heads.q[1] * sizes.v_dim)
    gate = factory.column(f"{name}.gate", hidden_size, [Output("", sizes.num_heads * sizes.v_dim, share)], bias=False)
    return GatedLatent(latent, gate)
