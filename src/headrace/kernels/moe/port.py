"""The port of the experts' kernels: what a backend is given, what it answers.

A backend routes tokens to experts and runs the experts' gated MLPs over them. Weights come stacked by expert, as the
recipe that loaded them stores them; a backend may repack them once (`prepare`) and owns what it made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.kernels.quantise import PLAIN, Form

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_top", "sigmoid_top"]
"""Scores of all experts, or (`..._top`) of the chosen ones only, which are then chosen by their logits."""
GroupScore = Literal["max", "top2"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "situ"]
Storage = Literal["plain", "fp8", "mxfp4"]

MXFP4_BLOCK = 32
"""Inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen for a token, and what their results are weighted with.

    With groups (DeepSeek-AI 2024), only experts of the `top_groups` best of `num_groups` equal groups may be chosen; a
    group's score is that of its best expert, or of its two best together.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalise: bool = False
    """The chosen weights are divided by their sum."""
    scaling: float = 1.0
    """What weights are multiplied with at the end."""
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2"


@dataclass(frozen=True, slots=True)
class ExpertAct:
    """What stands between an expert's two products: act(gate) * (up + up_offset).

    silu is gate * sigmoid(alpha * gate), which is what gpt-oss scales. Without a gate it is act(up).
    situ (Kimi-K3, Moonshot AI 2026) is alpha * tanh(gate / alpha) * sigmoid(gate), and its limit is a soft one: up
    becomes limit * tanh(up / limit). It has a gate.
    """

    kind: Activation = "silu"
    limit: float | None = None
    """The gate is cut above it, up on both sides."""
    alpha: float = 1.0
    up_offset: float = 0.0
    is_gated: bool = True
    is_interleaved: bool = False
    """Rows of the first product alternate between gate and up; otherwise all of the gate's come first."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """The weights of one product, of all experts on this rank.

    plain: data [experts, out, in] of any floating type.
    fp8: data [experts, out, in] e4m3; scales float32 [experts, out, 1], or [experts, ceil(out / 128), ceil(in / 128)].
    mxfp4 (Open Compute Project, Microscaling Formats 1.0): data [experts, out, in / 2] uint8, two e2m1 values a byte,
        the first one low; scales [experts, out, in / 32] uint8, e8m0.
    """

    storage: Storage
    data: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None  # [experts, out]
    form: Form = PLAIN
    """How activations are wanted; backends may take plain ones too."""

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    @property
    def out_features(self) -> int:
        return self.data.shape[1]

    @property
    def in_features(self) -> int:
        return self.data.shape[2] * (2 if self.storage == "mxfp4" else 1)

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scales, self.bias) if part is not None)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Everything of a layer's routed experts on this rank."""

    gate_up: Stacked
    """hidden -> 2 * inner, or inner where there is no gate."""
    down: Stacked
    """inner -> hidden; a partial sum where ranks share the inner features."""
    act: ExpertAct
    dtype: torch.dtype
    """Of activations between the products."""
    first_expert: int = 0
    """This rank has the experts from here on; tokens sent to others are left out."""
    weighs_input: bool = False
    """A token's weight multiplies an expert's input, not its result (Llama 4)."""


class Routed(NamedTuple):
    """Which experts each token is sent to."""

    ids: Tensor  # [tokens, top_k] int32
    weights: Tensor  # [tokens, top_k] float32


class MoeBackend(Protocol):
    """One way to run experts. Stateless: prepared weights are the caller's."""

    def prepare(self, weights: ExpertWeights) -> Any:
        """What `run` takes. The weights must not be used any more."""
        ...

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
        """Choose experts.

        Args:
            logits: [tokens, experts] of any floating type; computed on in float32.
            correction: [experts] float32, added to the scores that experts are chosen by, not to weights.
        """
        ...

    def run(self, x: Tensor, routed: Routed, prepared: Any) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], the weighted sum over each token's experts, in x's dtype."""
        ...
