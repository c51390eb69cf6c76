"""Mamba-2 (Dao and Gu 2024): projections, convolution, state space, gated norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.gated_norm import Ranks, gated_norm
from headrace.kernels.short_conv import short_conv
from headrace.kernels.ssd import ssd
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.linear import Linear, Output
from headrace.layers.norm import Norm
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act, LiveState, StateSpec
from headrace.layers.recurrent import SmallWeights
from headrace.layers.weights import Fused, Part, Slot

IN_SLOTS = ("z", "x", "b", "c", "dt")
CONV_SLOTS = ("x", "b", "c")
WIDE_PARTS = ("decay", "time_bias", "skip")
"""By head, in float32."""
NO_LIMITS = (0.0, math.inf)
"""Of step sizes, which are a softplus."""
Gating = Literal["gate, norm", "norm, gate", "gate"]
"""What comes behind the state space: the gate and a norm by group, in this order, or the gate alone."""


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Heads and groups of the whole model. The heads of a group share b and c."""

    num_heads: int
    dim: int
    num_groups: int
    state: int
    kernel: int
    time_limits: tuple[float, float] = NO_LIMITS
    """Step sizes are cut to these."""
    has_conv_bias: bool = True
    has_bias: bool = False
    """Of the first product, and of the last where `mamba` isn't told otherwise."""
    gating: Gating = "gate, norm"
    factors: tuple[float, ...] = ()
    """What the slots of the first product are multiplied with; () is nothing."""

    @property
    def width(self) -> int:
        return self.num_heads * self.dim

    @property
    def rows(self) -> dict[str, int]:
        """Of each slot of the first product."""
        shared = self.num_groups * self.state
        return {"z": self.width, "x": self.width, "b": shared, "c": shared, "dt": self.num_heads}

    def checked(self, place: str) -> MambaSizes:
        """
        Raises:
            ValueError: heads that can't be dealt to groups.
        """
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"{place}: {self.num_groups} groups (n_groups or mamba_n_groups) do not divide {self.num_heads} Mamba"
                " heads (their number in the config)"
            )
        return self


class MambaProjected(NamedTuple):
    """One layer's projections of a step."""

    gate: Tensor  # [tokens, width]
    xbc: Tensor  # [tokens, channels]: x, b, c of this rank, before the convolution
    time: Tensor  # [tokens, heads], before the softplus


class Mamba:
    """One block on one rank, which holds whole heads; a group's b and c are on every rank that has heads of it."""

    def __init__(
        self,
        *,
        projection: Linear,
        small: SmallWeights,
        out: Linear,
        sizes: MambaSizes,
        eps: float,
        spread: ParallelContext | None,
        state: StateSpec,
    ) -> None:
        """
        Args:
            sizes: with this rank's heads and groups.
            spread: the ranks that share the only group, whose norm is over all heads; None where groups are whole.
        """
        self.projection = projection
        self.small = small
        self.out = out
        self.sizes = sizes
        self.eps = eps
        self.spread = spread
        self.state = state
        self._factors: Tensor | None = None  # [outputs of the first product]

    def feed_from(self, norm: Norm) -> None:
        """One product takes what the norm yields."""
        norm.feed(self.projection)

    def project(self, act: Act) -> MambaProjected:
        sizes = self.sizes
        projected = self.projection(act)
        if sizes.factors:
            projected = projected * self._factors_like(projected)
        gate, xbc, time = projected.split(
            (sizes.width, sizes.width + 2 * sizes.num_groups * sizes.state, sizes.num_heads), -1
        )
        return MambaProjected(gate, xbc, time)

    def _factors_like(self, projected: Tensor) -> Tensor:
        if self._factors is None:
            each = zip(self.sizes.rows.values(), self.sizes.factors)
            self._factors = torch.cat([projected.new_full((rows,), factor) for rows, factor in each])
        return self._factors

    def mix(self, projected: MambaProjected, live: LiveState) -> Act:
        sizes, small = self.sizes, self.small
        conv, state = live.tensors
        bias = small["conv_bias"] if sizes.has_conv_bias else None
        mixed = short_conv(projected.xbc, small["conv"][:, 0], bias, conv, live.step)
        shared = sizes.num_groups * sizes.state
        x, b, c = mixed.split((sizes.width, shared, shared), -1)
        time = F.softplus(projected.time + small["time_bias"])  # float32, as the weight is
        if sizes.time_limits != NO_LIMITS:
            time = time.clamp(*sizes.time_limits)
        out = ssd(
            x.unflatten(-1, (sizes.num_heads, sizes.dim)),
            b.unflatten(-1, (sizes.num_groups, sizes.state)),
            c.unflatten(-1, (sizes.num_groups, sizes.state)),
            time=time,
            decay=-small["decay"].exp() * time,
            skip=small["skip"],
            state=state,
            step=live.step,
        )
        return self._gated(out, projected.gate)

    def _gated(self, out: Tensor, gate: Tensor) -> Act:
        """out: [tokens, heads, dim] float32; gate: [tokens, width]"""
        sizes, form = self.sizes, self.out.wanted
        if sizes.gating == "gate":
            return gated_norm(out, gate.unflatten(-1, (sizes.num_heads, sizes.dim)), None, form=form)
        by_group = (sizes.num_groups, -1)
        return gated_norm(
            out.flatten(1).unflatten(-1, by_group),
            gate.unflatten(-1, by_group),
            self.small["norm"].view(by_group),
            self.eps,
            is_gated_first=sizes.gating == "gate, norm",
            ranks=None if self.spread is None else Ranks(self.spread.collectives.all_reduce, self.spread.size),
            form=form,
        )

    def output(self, mixed: Act) -> Tensor:
        """[tokens, width] -> [tokens, hidden], partial"""
        return self.out(mixed)


def mamba(
    factory: LayerFactory,
    name: str,
    *,
    hidden_size: int,
    sizes: MambaSizes,
    eps: float,
    state_dtype: torch.dtype,
    out_bias: bool | None = None,
) -> Mamba:
    """A block.

    Modules: `{name}.in` (slots z, x, b, c, dt), `{name}.conv` and, with a bias, `{name}.conv_bias` (slots x, b, c),
    `{name}.decay`, `{name}.time_bias`, `{name}.skip`, `{name}.norm` unless there is none, `{name}.out`.

    Args:
        out_bias: of the last product; None is as of the first.

    Raises:
        ValueError: more ranks than the groups can be dealt to.
    """
    parallel = factory.parallel
    heads = parallel.heads(sizes.num_heads, sizes.num_groups)
    if parallel.size > sizes.num_groups and (sizes.num_groups > 1 or sizes.num_heads % parallel.size):
        most = sizes.num_groups if sizes.num_groups > 1 else sizes.num_heads
        raise ValueError(
            f"tensor_parallel_size {parallel.size} can't share {sizes.num_heads} Mamba heads in {sizes.num_groups}"
            f" groups: use at most {most}, a divisor of the heads"
        )
    wide, shared = _times(heads.q, sizes.dim), _times(heads.kv, sizes.state)
    shares = {"z": wide, "x": wide, "b": shared, "c": shared, "dt": heads.q}
    parts = _small_parts(sizes, shares)
    small = SmallWeights(
        name,
        parts,
        dtypes={part: torch.float32 if part in WIDE_PARTS else factory.dtype for part in parts},
        device=factory.device,
    )
    factory.modules.append(small)
    outputs = [Output(slot, sizes.rows[slot], shares[slot]) for slot in IN_SLOTS]
    local = replace(sizes, num_heads=heads.num_heads, num_groups=heads.num_kv_heads)
    channels = local.width + 2 * local.num_groups * local.state
    return Mamba(
        projection=factory.column(f"{name}.in", hidden_size, outputs, bias=sizes.has_bias),
        small=small,
        out=factory.row(
            f"{name}.out", sizes.width, hidden_size, share=wide, bias=sizes.has_bias if out_bias is None else out_bias
        ),
        sizes=local,
        eps=eps,
        spread=parallel if parallel.size > sizes.num_groups else None,
        state=StateSpec(
            ((channels, sizes.kernel - 1), (local.num_heads, sizes.dim, sizes.state)), (factory.dtype, state_dtype)
        ),
    )


def _small_parts(sizes: MambaSizes, shares: Mapping[str, tuple[int, int]]) -> dict[str, list[Slot]]:
    """What no product takes. shares: of the slots of the first product, on this rank."""
    rows = sizes.rows
    parts = {part: [Slot("", (sizes.num_heads,), Part(0, *shares["dt"]))] for part in WIDE_PARTS}
    parts["conv"] = [Slot(slot, (rows[slot], 1, sizes.kernel), Part(0, *shares[slot])) for slot in CONV_SLOTS]
    if sizes.has_conv_bias:
        parts["conv_bias"] = [Slot(slot, (rows[slot],), Part(0, *shares[slot])) for slot in CONV_SLOTS]
    if sizes.gating != "gate":
        parts["norm"] = [Slot("", (sizes.width,), Part(0, *shares["x"]))]
    return parts


def _times(share: tuple[int, int], each: int) -> tuple[int, int]:
    return share[0] * each, share[1] * each


def mamba_rules(block: str, part: str) -> dict[str, str]:
    """Weight rules of a block; `mamba_fused` says how its tensors are read as several.

    Args:
        block: what checkpoints call it, such as `model.layers.*.mixer`.
        part: its name here, such as `layers.*.mamba`.
    """
    return {
        **{f"{block}.in_proj_{slot}.*": f"{part}.in.*:{slot}" for slot in IN_SLOTS},
        **{f"{block}.conv1d.{slot}.weight": f"{part}.conv:{slot}" for slot in CONV_SLOTS},
        **{f"{block}.conv1d.{slot}.bias": f"{part}.conv_bias:{slot}" for slot in CONV_SLOTS},
        f"{block}.A_log": f"{part}.decay",
        f"{block}.dt_bias": f"{part}.time_bias",
        f"{block}.D": f"{part}.skip",
        f"{block}.norm.weight": f"{part}.norm",
        f"{block}.out_proj.*": f"{part}.out.*",
    }


def mamba_fused(block: str, sizes: MambaSizes) -> Fused:
    rows = sizes.rows
    return {
        f"{block}.in_proj.*": {f"{block}.in_proj_{slot}.*": rows[slot] for slot in IN_SLOTS},
        **{
            f"{block}.conv1d.{kind}": {f"{block}.conv1d.{slot}.{kind}": rows[slot] for slot in CONV_SLOTS}
            for kind in ("weight", "bias")
        },
    }


def time_limits(config: HfConfig) -> tuple[float, float]:
    """`time_step_limit`. JSON has no infinity: configs write `Infinity`, or it as a string or in an object."""
    stated = config.get("time_step_limit", NO_LIMITS)
    try:
        low, high = (_number(value) for value in stated)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ValueError(f"{config.place}: time_step_limit must be two numbers, not {stated!r}") from None
    if not 0 <= low < high:
        raise ValueError(f"{config.place}: time_step_limit must be from 0 on and ascending, not {stated!r}")
    return low, high


def _number(value: Any) -> float:
    return float(value["__float__"] if isinstance(value, Mapping) else value)
