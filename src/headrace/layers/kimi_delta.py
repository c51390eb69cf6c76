"""Kimi Delta Attention (Kimi Team 2025): the delta rule with a decay by key feature, and an output gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

BLOCK, PART = "model.layers.*.self_attn", "layers.*.delta"
DELTA_RULES: Mapping[str, str] = {
    **{f"{BLOCK}.{slot}_proj.*": f"{PART}.qkv.*:{slot}" for slot in ("q", "k", "v")},
    **{f"{BLOCK}.{slot}_conv1d.weight": f"{PART}.conv:{slot}" for slot in ("q", "k", "v")},
    f"{BLOCK}.b_proj.*": f"{PART}.beta.*",
    f"{BLOCK}.f_a_proj.*": f"{PART}.down.*:forget",
    f"{BLOCK}.f_b_proj.*": f"{PART}.forget.*",
    f"{BLOCK}.g_a_proj.*": f"{PART}.down.*:gate",
    f"{BLOCK}.g_b_proj.*": f"{PART}.gate.*",
    f"{BLOCK}.g_proj.*": f"{PART}.gate.*",
    f"{BLOCK}.A_log": f"{PART}.decay",
    f"{BLOCK}.dt_bias": f"{PART}.time_bias",
    f"{BLOCK}.o_norm.weight": f"{PART}.norm",
    f"{BLOCK}.o_proj.*": f"{PART}.out.*",
}
"""The names that Hugging Face checkpoints use."""


def beside_delta(rules: Mapping[str, str], layers: Sequence[int]) -> dict[str, str]:
    """Weight rules of both kinds: some projections are called the same in these layers, which stand first.

    Args:
        rules: of the other kind.
        layers: of it.
    """
    same = {
        name.replace("*", str(index), 1): place.replace("*", str(index), 1)
        for index in layers
        for name, place in rules.items()
        if name in DELTA_RULES
    }
    return {**same, **DELTA_RULES, **{name: place for name, place in rules.items() if name not in DELTA_RULES}}


@dataclass(frozen=True, slots=True)
class KimiDeltaSizes:
    """Heads of the whole model; keys and values have as many features."""

    num_heads: int
    dim: int
    kernel: int
    lower_bound: float | None = None
    """Of the decay's logarithm, which comes near it by a sigmoid; None: it has none."""
    is_decay_flat: bool = False
    """A checkpoint has it as [heads], not as [1, 1, heads, 1]."""
    num_spare_decays: int = 0
    """A checkpoint may have so many zeros behind flat ones."""
    has_full_gate: bool = False
    """The output gate is made in one product, not over as many features as a head has."""


class KimiDeltaProjected(NamedTuple):
    """One layer's projections of a step."""

    qkv: Tensor  # [tokens, channels]: q, k, v of this rank's heads, before the convolution
    decay: Tensor  # [tokens, heads, dim], before the softplus
    gate: Tensor  # [tokens, heads, dim], before the sigmoid
    beta: Tensor  # [tokens, heads], before the sigmoid


class KimiDelta:
    """One block on one rank, which holds whole heads."""

    def __init__(
        self,
        *,
        qkv: Linear,
        beta: Linear,
        down: Linear,
        forget: Linear,
        gate: Linear,
        small: SmallWeights,
        out: Linear,
        sizes: KimiDeltaSizes,
        eps: float,
        state: StateSpec,
    ) -> None:
        """
        Args:
            down: to what `forget` takes, then what a low-rank `gate` takes; every rank computes all of it.
            sizes: with this rank's heads.
        """
        self.qkv = qkv
        self.beta = beta
        self.down = down
        self.forget = forget
        self.gate = gate
        self.small = small
        self.out = out
        self.sizes = sizes
        self.eps = eps
        self.state = state

    def feed_from(self, norm: Norm) -> None:
        """Several products take what the norm yields, so it stays plain."""

    def project(self, act: Act) -> KimiDeltaProjected:
        low, by_head = self.down(act), (self.sizes.num_heads, self.sizes.dim)
        gated = act if self.sizes.has_full_gate else Act(low[:, self.sizes.dim :].contiguous())
        return KimiDeltaProjected(
            qkv=self.qkv(act),
            decay=self.forget(Act(low[:, : self.sizes.dim].contiguous())).unflatten(-1, by_head),
            gate=self.gate(gated).unflatten(-1, by_head),
            beta=self.beta(act),
        )

    def mix(self, projected: KimiDeltaProjected, live: LiveState) -> Act:
        small, by_head = self.small, (self.sizes.num_heads, self.sizes.dim)
        conv, state = live.tensors
        mixed = short_conv(projected.qkv, small["conv"][:, 0], None, conv, live.step)
        q, k, v = (part.unflatten(-1, by_head) for part in mixed.chunk(3, -1))
        # In float32, as the weights are: the sum widens what it reads.
        speed, rate = projected.decay + small["time_bias"].view(by_head), small["decay"].exp()
        if self.sizes.lower_bound is None:
            decay = -rate.view(-1, 1) * F.softplus(speed)
        else:
            decay = self.sizes.lower_bound * torch.sigmoid(rate.view(-1, 1) * speed)
        out = delta_rule(
            q,
            k,
            v,
            decay=decay,
            beta=projected.beta.float().sigmoid(),
            state=state,
            step=live.step,
        )
        return gated_norm(out, projected.gate, small["norm"], self.eps, act="sigmoid", form=self.out.wanted)

    def output(self, mixed: Act) -> Tensor:
        """[tokens, heads * dim] -> [tokens, hidden], partial"""
        return self.out(mixed)


def kimi_delta(
    factory: LayerFactory, name: str, *, hidden_size: int, sizes: KimiDeltaSizes, eps: float, state_dtype: torch.dtype
) -> KimiDelta:
    """A block.

    Modules: `{name}.qkv` and `{name}.conv` (slots q, k, v), `{name}.beta`, `{name}.down` (slots forget and, of a
    low-rank gate, gate), `{name}.forget`, `{name}.gate`, `{name}.decay`, `{name}.time_bias`, `{name}.norm`,
    `{name}.out`.
    """
    width, dim = sizes.num_heads * sizes.dim, sizes.dim
    low = ("forget",) if sizes.has_full_gate else ("forget", "gate")
    start, stop = factory.parallel.heads(sizes.num_heads, sizes.num_heads).q
    share = (start * dim, stop * dim)
    small = SmallWeights(
        name,
        {
            "conv": [Slot(slot, (width, 1, sizes.kernel), Part(0, *share)) for slot in ("q", "k", "v")],
            "decay": [
                Slot("", (sizes.num_heads,), Part(0, start, stop), sizes.num_spare_decays)
                if sizes.is_decay_flat
                else Slot("", (1, 1, sizes.num_heads, 1), Part(2, start, stop))
            ],
            "time_bias": [Slot("", (width,), Part(0, *share))],
            "norm": [Slot("", (dim,))],
        },
        dtypes={"conv": factory.dtype, "decay": torch.float32, "time_bias": torch.float32, "norm": factory.dtype},
        device=factory.device,
    )
    factory.modules.append(small)
    local = replace(sizes, num_heads=stop - start)
    channels = 3 * local.num_heads * dim
    return KimiDelta(
        qkv=factory.column(
            f"{name}.qkv", hidden_size, [Output(slot, width, share) for slot in ("q", "k", "v")], bias=False
        ),
        beta=factory.column(f"{name}.beta", hidden_size, [Output("", sizes.num_heads, (start, stop))], bias=False),
        down=factory.column(f"{name}.down", hidden_size, [Output(slot, dim, (0, dim)) for slot in low], bias=False),
        forget=factory.column(f"{name}.forget", dim, [Output("", width, share)], bias=False),
        gate=factory.column(
            f"{name}.gate", hidden_size if sizes.has_full_gate else dim, [Output("", width, share)], bias=False
        ),
        small=small,
        out=factory.row(f"{name}.out", width, hidden_size, share=share, bias=False),
        sizes=local,
        eps=eps,
        state=StateSpec(
            ((channels, sizes.kernel - 1), (local.num_heads, dim, dim)),
            (factory.dtype, state_dtype),
        ),
    )


def full_layers(config: HfConfig) -> frozenset[int]:
    """Layers, from 0, that attend to everything; `linear_attn_config` lists them and the others from 1.

    Raises:
        ValueError: they are not each of the model's layers once.
    """
    lists, count = config.section("linear_attn_config"), config.integer("num_hidden_layers")
    full, linear = lists.places("full_attn_layers"), lists.places("kda_layers")
    if sorted([*full, *linear]) != [*range(1, count + 1)]:
        raise ValueError(
            f"{lists.place}: full_attn_layers and kda_layers must name each of the layers 1 to {count} once"
        )
    return frozenset(layer - 1 for layer in full)
