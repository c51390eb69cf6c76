"""The contract of the experts' kernels: routing and running equal an obvious loop over tokens in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels.fp8_linear import BLOCK
from headrace.kernels.moe.port import ExpertAct, ExpertWeights, MoeBackend, Routed, Routing, Stacked
from headrace.kernels.quantise import FP8, dequantise, quantise_twin
from headrace.quant.fp8 import Fp8
from headrace.quant.fp8_block import Fp8Block
from headrace.quant.fp8_dynamic import Fp8Dynamic
from headrace.quant.mxfp4 import Mxfp4

E2M1 = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""By code, from the format's table."""


SILU = ExpertAct()


@dataclass(frozen=True)
class Case:
    """A layer's experts and the tokens of a step."""

    num_tokens: int = 7
    num_experts: int = 5
    top_k: int = 2
    hidden: int = 48
    inner: int = 40
    act: ExpertAct = SILU
    recipe: str = "none"
    bias: bool = False
    first_expert: int = 0
    num_local: int | None = None
    weighs_input: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "half": Case(dtype=torch.bfloat16, num_tokens=20),
    "one token": Case(num_tokens=1, top_k=1),
    "no token": Case(num_tokens=0),
    "all to one expert": Case(num_tokens=40, num_experts=1, top_k=1),
    "cut, interleaved, with biases": Case(
        act=ExpertAct(limit=0.7, alpha=1.7, up_offset=1.0, is_interleaved=True), bias=True, top_k=3
    ),
    "no gate": Case(act=ExpertAct("relu2", is_gated=False)),
    "gelu": Case(act=ExpertAct("gelu_tanh")),
    "situ": Case(act=ExpertAct("situ", alpha=1.3, limit=2.0)),
    "situ, no limit": Case(act=ExpertAct("situ", alpha=0.6), dtype=torch.bfloat16),
    "weighs the input": Case(weighs_input=True, top_k=1),
    "some experts": Case(num_experts=9, first_expert=3, num_local=4, top_k=4, num_tokens=11),
    "fp8 static": Case(recipe="fp8", dtype=torch.bfloat16, hidden=64, inner=32),
    "fp8 by output": Case(recipe="fp8_dynamic", dtype=torch.bfloat16, hidden=64, inner=32),
    "fp8 blocks": Case(recipe="fp8_block", dtype=torch.bfloat16, hidden=256, inner=128, num_experts=3),
    "mxfp4": Case(recipe="mxfp4", hidden=64, inner=96, bias=True, num_experts=3),
    "mxfp4, half": Case(recipe="mxfp4", dtype=torch.bfloat16, hidden=160, inner=64, num_experts=3),
    "mxfp4, interleaved": Case(
        act=ExpertAct(limit=0.7, alpha=1.7, up_offset=1.0, is_interleaved=True),
        recipe="mxfp4",
        bias=True,
        hidden=128,
        inner=192,
        num_tokens=40,
        dtype=torch.bfloat16,
    ),
    "mxfp4, no gate": Case(act=ExpertAct("relu2", is_gated=False), recipe="mxfp4", hidden=64, inner=64),
}


@dataclass(frozen=True)
class Side:
    """One product: as backends get it, what it stands for, and the form of activations that is computed with."""

    stacked: Stacked
    plain: Tensor  # [experts, out, in] float64


def make_side(case: Case, num_experts: int, widths: list[int], features: int, draw: torch.Generator) -> Side:
    out = sum(widths)
    bias = torch.randn(num_experts, out, generator=draw).to(case.dtype) if case.bias else None
    weight = torch.randn(num_experts, out, features, generator=draw) * 0.3

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw) * 0.01 + 0.002

    codes = (weight * 100).clamp(-448, 448).to(FP8)
    wide = codes.double()
    if case.recipe == "none":
        held = weight.to(case.dtype)
        return Side(Stacked("plain", held, bias=bias), held.double())
    if case.recipe == "fp8":
        scale, of_input = scales(num_experts, len(widths)), scales(num_experts, len(widths)) * 2
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": of_input}
        plain = wide * scale.double().repeat_interleave(torch.tensor(widths), 1).unsqueeze(2)
        return Side(Fp8().stack(tensors, bias, widths=widths, dtype=case.dtype), plain)
    if case.recipe == "fp8_dynamic":
        scale = scales(num_experts, out, 1)
        tensors = {"weight": codes, "weight_scale": scale}
        return Side(Fp8Dynamic().stack(tensors, bias, widths=widths, dtype=case.dtype), wide * scale.double())
    if case.recipe == "fp8_block":
        scale = scales(num_experts, -(-out // BLOCK), -(-features // BLOCK))
        tensors = {"weight": codes, "weight_scale_inv": scale}
        by_value = scale.double().repeat_interleave(BLOCK, 1)[:, :out].repeat_interleave(BLOCK, 2)[..., :features]
        return Side(Fp8Block().stack(tensors, bias, widths=widths, dtype=case.dtype), wide * by_value)
    assert case.recipe == "mxfp4"
    blocks = torch.randint(256, (num_experts, out, features // 32, 16), generator=draw).to(torch.uint8)
    exponents = torch.randint(120, 128, (num_experts, out, features // 32), generator=draw).to(torch.uint8)
    low, high = (torch.tensor(E2M1)[part.long()] for part in (blocks & 15, blocks >> 4))
    plain = torch.stack((low, high), -1).flatten(-2).double() * 2.0 ** (exponents.double() - 127).unsqueeze(-1)
    stacked = Mxfp4().stack({"blocks": blocks, "scales": exponents}, bias, widths=widths, dtype=case.dtype)
    return Side(stacked, plain.flatten(2))


class World:
    """Random weights and tokens of a case."""

    def __init__(self, case: Case, *, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.case = case
        num_local = case.num_local or case.num_experts
        widths = [case.inner] * (2 if case.act.is_gated else 1)
        self.gate_up = make_side(case, num_local, widths, case.hidden, draw)
        self.down = make_side(case, num_local, [case.hidden], case.inner, draw)
        self.x = torch.randn(case.num_tokens, case.hidden, generator=draw).to(case.dtype)
        order = torch.rand(case.num_tokens, case.num_experts, generator=draw).argsort(1)
        weights = torch.rand(case.num_tokens, case.top_k, generator=draw)
        self.routed = Routed(order[:, : case.top_k].int(), weights)

    def weights(self) -> ExpertWeights:
        case = self.case
        return ExpertWeights(
            self.gate_up.stacked, self.down.stacked, case.act, case.dtype, case.first_expert, case.weighs_input
        )

    def reference(self) -> Tensor:
        """[tokens, hidden] float64, one token and one of its experts after the other."""
        case = self.case
        out = torch.zeros(case.num_tokens, case.hidden, dtype=torch.float64)
        for token, choice in itertools.product(range(case.num_tokens), range(case.top_k)):
            expert = int(self.routed.ids[token, choice]) - case.first_expert
            weight = float(self.routed.weights[token, choice])
            if not 0 <= expert < len(self.gate_up.plain):
                continue
            x = self.x[token]
            if case.weighs_input:
                x, weight = (x.float() * weight).to(case.dtype), 1.0
            inner = activated(self._product(x, self.gate_up, expert), case.act)
            out[token] += weight * self._product(inner.to(case.dtype), self.down, expert)
        return out

    def _product(self, x: Tensor, side: Side, expert: int) -> Tensor:
        seen = dequantise(quantise_twin(x.unsqueeze(0), side.stacked.form))[0].double()
        out = side.plain[expert] @ seen
        return out if side.stacked.bias is None else out + side.stacked.bias[expert].double()


def activated(x: Tensor, act: ExpertAct) -> Tensor:
    """x: [2 * inner] or [inner] float64"""
    if not act.is_gated:
        return torch.relu(x).square()
    gate, up = (x[::2], x[1::2]) if act.is_interleaved else x.chunk(2)
    if act.kind == "situ":
        up = up if act.limit is None else act.limit * torch.tanh(up / act.limit)
        return act.alpha * torch.tanh(gate / act.alpha) * torch.sigmoid(gate) * up
    if act.limit is not None:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    turned = (
        torch.nn.functional.gelu(gate, approximate="tanh")
        if act.kind == "gelu_tanh"
        else gate * torch.sigmoid(act.alpha * gate)
    )
    return turned * (up + act.up_offset)


def check_run(backend: MoeBackend, case: Case) -> None:
    world = World(case)
    got = backend.run(world.x, world.routed, backend.prepare(world.weights()))
    assert got.dtype == case.dtype and got.shape == world.x.shape
    expected = world.reference()
    size = float(expected.abs().max()) if len(expected) else 1.0
    # Rounding of what stands between the products, in the activations' dtype or to FP8.
    tolerance = {"none": 1e-5, "mxfp4": 1e-5}.get(case.recipe, 0.08) if case.dtype == torch.float32 else 0.03
    if case.recipe.startswith("fp8"):
        tolerance = 0.08
    torch.testing.assert_close(got.double(), expected, atol=tolerance * size, rtol=0)


ROUTINGS = {
    "softmax": Routing(10, 3),
    "softmax, normalised and scaled": Routing(10, 3, normalise=True, scaling=2.5),
    "sigmoid": Routing(10, 3, scoring="sigmoid", normalise=True),
    "root of softplus": Routing(10, 3, scoring="sqrt_softplus", normalise=True, scaling=1.5),
    "chosen by logits": Routing(10, 4, scoring="softmax_top"),
    "one by its logit": Routing(10, 1, scoring="sigmoid_top"),
    "groups by their two best": Routing(12, 3, scoring="sigmoid", num_groups=4, top_groups=2, normalise=True),
    "groups by their best": Routing(12, 4, num_groups=3, top_groups=2, group_score="max", scaling=16.0),
    "all": Routing(4, 4),
}


def check_route(backend: MoeBackend, routing: Routing, *, has_correction: bool, num_tokens: int = 9) -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(num_tokens, routing.num_experts, generator=draw)
    correction = torch.randn(routing.num_experts, generator=draw) * 0.5 if has_correction else None
    got = backend.route(logits, correction, routing)
    assert got.ids.dtype == torch.int32 and got.weights.dtype == torch.float32
    for token in range(num_tokens):
        ids, weights = reference_route(logits[token].double(), correction, routing)
        assert got.ids[token].tolist() == ids
        torch.testing.assert_close(got.weights[token].double(), weights, atol=1e-6, rtol=1e-5)


def reference_route(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[list[int], Tensor]:
    """One token, with sorted lists."""
    scores = {
        "softmax": torch.softmax(logits, 0),
        "sigmoid": torch.sigmoid(logits),
        "sqrt_softplus": torch.log1p(torch.exp(logits)) ** 0.5,
    }.get(routing.scoring, logits)
    choice = (scores if correction is None else scores + correction.double()).tolist()
    size = routing.num_experts // routing.num_groups
    groups = [list(range(group * size, (group + 1) * size)) for group in range(routing.num_groups)]
    best = 1 if routing.group_score == "max" else 2
    groups.sort(key=lambda members: -sum(sorted((choice[e] for e in members), reverse=True)[:best]))
    allowed = [expert for members in groups[: routing.top_groups] for expert in members]
    ids = sorted(allowed, key=lambda expert: -choice[expert])[: routing.top_k]
    weights = scores[ids]
    if routing.scoring == "softmax_top":
        weights = torch.softmax(weights, 0)
    if routing.scoring == "sigmoid_top":
        weights = torch.sigmoid(weights)
    if routing.normalise:
        weights = weights / weights.sum()
    return ids, weights * routing.scaling


def moved(weights: ExpertWeights, device: str) -> ExpertWeights:
    """The same on another device."""

    def move(side: Stacked) -> Stacked:
        parts = {name: getattr(side, name) for name in ("data", "scales", "bias")}
        scale = None if side.form.scale is None else side.form.scale.to(device)
        there = {name: None if part is None else part.to(device) for name, part in parts.items()}
        return replace(side, form=replace(side.form, scale=scale), **there)

    return replace(weights, gate_up=move(weights.gate_up), down=move(weights.down))
