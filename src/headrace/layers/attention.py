"""The attention module: fused projections, optional norms of queries and keys, rope, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.attention.port import AttentionSpec
from headrace.kernels.rope_write import Projected
from headrace.layers.heads import HeadStep, Sinks, no_rope
from headrace.layers.linear import Linear
from headrace.layers.norm import HeadNorm, Norm
from headrace.layers.port import Act, ForwardStep, Mixer
from headrace.layers.weights import Parameter, Slot


class KvScales:
    """The scales of an FP8 cache, where a checkpoint states them: `{name}.k_scale:k` and `{name}.v_scale:v`."""

    def __init__(self, name: str, *, device: torch.device) -> None:
        self._parameters = tuple(
            Parameter(
                f"{name}.{part}_scale", [Slot(part, (1,))], dtype=torch.float32, device=device, init="one", default=1.0
            )
            for part in ("k", "v")
        )
        self.values = (1.0, 1.0)
        """Of keys and of values."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self._parameters

    def finish(self) -> None:
        k, v = (float(parameter.take()) for parameter in self._parameters)
        if not (k > 0 and v > 0):
            raise ValueError(f"{self._parameters[0].name} and v_scale must be greater than 0, not {k} and {v}")
        self.values = (k, v)


class AttentionBlock(Protocol):
    """A block of any kind of attention without its norm: what a decoder layer puts together."""

    @property
    def spec(self) -> Any:
        """Of its kind; final once the weights are loaded."""
        ...

    def feed_from(self, norm: Norm) -> None:
        """Say what the norm before the block is to yield."""
        ...

    def project(self, act: Act, step: ForwardStep) -> Any:
        """[tokens, hidden] -> what `attend` takes"""
        ...

    def attend(self, mixer_input: Any, mixer: Mixer) -> Act:
        """-> what `output` takes"""
        ...

    def output(self, mixed: Act) -> Tensor:
        """-> [tokens, hidden], partial"""
        ...


class Attention:
    """Everything of an attention block but attending itself, which the runner hands to the layer."""

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        *,
        spec: AttentionSpec,
        rope: str | None,
        kv_scales: KvScales,
        interleaved: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        steps: Sequence[HeadStep] = (),
        sinks: Sinks | None = None,
    ) -> None:
        """
        Args:
            rope: which of the model's rope kinds turns q and k; None: none does.
            interleaved: rope turns pairs of neighbouring features.
            steps: what is done to the heads, in order, before the kernels do the rest.
        """
        self.qkv = qkv
        self.out = out
        self.rope = rope
        self.interleaved = interleaved
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.steps = tuple(steps)
        self._sinks = sinks
        self._spec = spec
        self.kv_scales = kv_scales

    def feed_from(self, norm: Norm) -> None:
        """The norm before the block makes what its first product takes."""
        norm.feed(self.qkv)

    @property
    def spec(self) -> AttentionSpec:
        """With the checkpoint's scales and sinks once it is loaded."""
        sinks = None if self._sinks is None else self._sinks.logits
        k_scale, v_scale = self.kv_scales.values
        if sinks is None and k_scale == v_scale == 1.0:
            return self._spec
        return replace(self._spec, sinks=sinks, k_scale=k_scale, v_scale=v_scale)

    def project(self, act: Act, step: ForwardStep) -> Projected:
        """[tokens, hidden] -> the packed heads, and what is owed to them"""
        return self.ready(self.qkv(act), step)

    def ready(self, heads: Tensor, step: ForwardStep) -> Projected:
        """heads: [tokens, (heads + 2 * kv_heads) * dim], q, k, v"""
        rope = no_rope(step) if self.rope is None else step.ropes[self.rope]
        packed = Projected(
            heads,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            rope.cos,
            rope.sin,
            interleaved=self.interleaved,
            q_norm=None if self.q_norm is None else self.q_norm.ready(),
            k_norm=None if self.k_norm is None else self.k_norm.ready(),
        )
        for change in self.steps:
            packed = change(packed, step)
        return packed

    def attend(self, mixer_input: Any, mixer: Mixer) -> Act:
        """What `project` made, mixed, as the output projection takes it."""
        return mixer(mixer_input, self.out.wanted)

    def output(self, mixed: Act) -> Tensor:
        """[tokens, heads * dim] -> [tokens, hidden], partial"""
        return self.out(mixed)
