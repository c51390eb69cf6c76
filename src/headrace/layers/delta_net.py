"""Gated DeltaNet (Yang et al. 2025), as Qwen3-Next and Qwen3.5 have it: projections, convolution, scan, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.delta_rule import delta_rule
from headrace.kernels.gated_norm import gated_norm
from headrace.kernels.short_conv import short_conv
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.linear import Linear, Output
from headrace.layers.norm import Norm
from headrace.layers.port import Act, LiveState, StateSpec
from headrace.layers.recurrent import SmallWeights
from headrace.layers.weights import Part, Slot


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads of the whole model."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    kernel: int

    @classmethod
    def of(cls, config: HfConfig) -> DeltaSizes:
        sizes = cls(
            num_k_heads=config.integer("linear_num_key_heads"),
            num_v_heads=config.integer("linear_num_value_heads"),
            k_dim=config.integer("linear_key_head_dim"),
            v_dim=config.integer("linear_value_head_dim"),
            kernel=config.integer("linear_conv_kernel_dim", least=2),
        )
        if sizes.num_v_heads % sizes.num_k_heads:
            raise ValueError(
                f"{config.place}: linear_num_key_heads {sizes.num_k_heads} does not divide linear_num_value_heads"
                f" {sizes.num_v_heads}"
            )
        return sizes

    def check_ranks(self, size: int) -> None:
        """
        Raises:
            ValueError: more ranks than key heads.
        """
        if size > self.num_k_heads:
            raise ValueError(
                f"tensor_parallel_size {size} is too large for {self.num_k_heads} key heads of recurrent layers: use at"
                f" most {self.num_k_heads}"
            )


class DeltaProjected(NamedTuple):
    """One layer's projections of a step."""

    qkv: Tensor  # [tokens, channels]: q, k, v of this rank's heads, before the convolution
    gate: Tensor  # [tokens, v_heads, v_dim]
    beta: Tensor  # [tokens, v_heads], before the sigmoid
    decay: Tensor  # [tokens, v_heads], before the softplus


class DeltaNet:
    """One block on one rank, which holds whole key heads with their value heads."""

    def __init__(
        self,
        *,
        projection: Linear,
        rates: Linear,
        small: SmallWeights,
        out: Linear,
        sizes: DeltaSizes,
        eps: float,
        is_grouped: bool,
        state: StateSpec,
    ) -> None:
        """
        Args:
            projection: to queries, keys, values and gates.
            rates: to beta and decay.
            sizes: with this rank's heads.
            is_grouped: what a key head and its value heads need lies together in both; else one kind after another.
        """
        self.projection = projection
        self.rates = rates
        self.small = small
        self.out = out
        self.sizes = sizes
        self.eps = eps
        self.is_grouped = is_grouped
        self.state = state

    def feed_from(self, norm: Norm) -> None:
        """Two products take what the norm yields, so it stays plain."""

    def project(self, act: Act) -> DeltaProjected:
        sizes = self.sizes
        packed, rates = self.projection(act), self.rates(act)
        if self.is_grouped:
            return self._ungroup(packed, rates)
        gates = sizes.num_v_heads * sizes.v_dim
        beta, decay = rates.chunk(2, -1)
        return DeltaProjected(
            packed[:, :-gates], packed[:, -gates:].unflatten(-1, (sizes.num_v_heads, sizes.v_dim)), beta, decay
        )

    def _ungroup(self, packed: Tensor, rates: Tensor) -> DeltaProjected:
        """By key head: (q, k, its values, its gates), and (its betas, its decays)."""
        sizes = self.sizes
        each = sizes.num_v_heads // sizes.num_k_heads
        parts = packed.unflatten(-1, (sizes.num_k_heads, -1))
        q, k, v, gate = parts.split((sizes.k_dim, sizes.k_dim, each * sizes.v_dim, each * sizes.v_dim), -1)
        beta, decay = rates.unflatten(-1, (sizes.num_k_heads, -1)).split((each, each), -1)
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), -1)
        gate = gate.reshape(len(gate), sizes.num_v_heads, sizes.v_dim)
        return DeltaProjected(qkv, gate, beta.flatten(1), decay.flatten(1))

    def mix(self, projected: DeltaProjected, live: LiveState) -> Act:
        sizes, small = self.sizes, self.small
        conv, state = live.tensors
        mixed = short_conv(projected.qkv, small["conv"][:, 0], None, conv, live.step)
        keys = sizes.num_k_heads * sizes.k_dim
        q, k, v = mixed.split((keys, keys, sizes.num_v_heads * sizes.v_dim), -1)
        decay = -small["decay"].exp() * F.softplus(projected.decay + small["time_bias"])  # float32, as the weights are
        out = delta_rule(
            q.unflatten(-1, (sizes.num_k_heads, sizes.k_dim)),
            k.unflatten(-1, (sizes.num_k_heads, sizes.k_dim)),
            v.unflatten(-1, (sizes.num_v_heads, sizes.v_dim)),
            decay=decay[..., None],
            beta=projected.beta.float().sigmoid(),
            state=state,
            step=live.step,
        )
        return gated_norm(out, projected.gate, small["norm"], self.eps, form=self.out.wanted)

    def output(self, mixed: Act) -> Tensor:
        """[tokens, v_heads * v_dim] -> [tokens, hidden], partial"""
        return self.out(mixed)


def delta_net(
    factory: LayerFactory, name: str, *, hidden_size: int, sizes: DeltaSizes, eps: float, is_grouped: bool,
    state_dtype: torch.dtype,
) -> DeltaNet:  # fmt: skip
    """A block.

    Modules: `{name}.in` (slot qkvz, or q, k, v, z), `{name}.rates` (slot ba, or b, a), `{name}.conv` (slots q, k, v),
    `{name}.decay`, `{name}.time_bias`, `{name}.norm`, `{name}.out`.
    """
    sizes.check_ranks(factory.parallel.size)
    heads = factory.parallel.heads(sizes.num_v_heads, sizes.num_k_heads)

    def of_keys(slot: str, each: int) -> Output:
        return Output(slot, sizes.num_k_heads * each, (heads.kv[0] * each, heads.kv[1] * each))

    def of_values(slot: str, each: int) -> Output:
        return Output(slot, sizes.num_v_heads * each, (heads.q[0] * each, heads.q[1] * each))

    conv = [of_keys("q", sizes.k_dim), of_keys("k", sizes.k_dim), of_values("v", sizes.v_dim)]
    each = sizes.num_v_heads // sizes.num_k_heads
    inputs, rates = [*conv, of_values("z", sizes.v_dim)], [of_values("b", 1), of_values("a", 1)]
    if is_grouped:
        inputs = [of_keys("qkvz", 2 * sizes.k_dim + 2 * each * sizes.v_dim)]
        rates = [of_keys("ba", 2 * each)]
    local = DeltaSizes(heads.num_kv_heads, heads.num_heads, sizes.k_dim, sizes.v_dim, sizes.kernel)
    by_head = [Slot("", (sizes.num_v_heads,), Part(0, *heads.q))]
    small = SmallWeights(
        name,
        {
            "conv": [Slot(out.name, (out.features, 1, sizes.kernel), Part(0, *out.share)) for out in conv],
            "decay": by_head,
            "time_bias": by_head,
            "norm": [Slot("", (sizes.v_dim,))],
        },
        dtypes={"conv": factory.dtype, "decay": torch.float32, "time_bias": torch.float32, "norm": factory.dtype},
        device=factory.device,
    )
    factory.modules.append(small)
    channels = sum(out.local_features for out in conv)
    return DeltaNet(
        projection=factory.column(f"{name}.in", hidden_size, inputs, bias=False),
        rates=factory.column(f"{name}.rates", hidden_size, rates, bias=False),
        small=small,
        out=factory.row(
            f"{name}.out",
            sizes.num_v_heads * sizes.v_dim,
            hidden_size,
            share=(heads.q[0] * sizes.v_dim, heads.q[1] * sizes.v_dim),
            bias=False,
        ),
        sizes=local,
        eps=eps,
        is_grouped=is_grouped,
        state=StateSpec(
            ((channels, sizes.kernel - 1), (local.num_v_heads, sizes.k_dim, sizes.v_dim)),
            (factory.dtype, state_dtype),
        ),
    )
