"""Every file of the experts' room against the obvious; what is only Triton's: sorting, and many pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import plugins
from headrace.kernels.moe.port import ExpertWeights, MoeBackend, Routed, Routing
from tests.kits.interpreter import DEVICES, HAS_INTERPRETER
from tests.kits.moe import CASES, ROUTINGS, Case, World, check_route, check_run, moved


class Moved:
    """A backend on another device than the tensors of the kit."""

    def __init__(self, name: str, device: str) -> None:
        self.backend: MoeBackend = plugins.load("kernels.moe", name)()
        self.device = device

    def prepare(self, weights: ExpertWeights) -> object:
        return self.backend.prepare(moved(weights, self.device))

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
        there = None if correction is None else correction.to(self.device)
        ids, weights = self.backend.route(logits.to(self.device), there, routing)
        return Routed(ids.cpu(), weights.cpu())

    def run(self, x: Tensor, routed: Routed, prepared: object) -> Tensor:
        there = Routed(routed.ids.to(self.device), routed.weights.to(self.device))
        return self.backend.run(x.to(self.device), there, prepared).cpu()


BACKENDS = [
    pytest.param((name, device), marks=marks, id=f"{name}-{device}")
    for name in plugins.names("kernels.moe")
    for device, marks in (
        [("cpu", pytest.mark.skipif(name == "triton" and not HAS_INTERPRETER, reason="needs Triton's interpreter"))]
        + ([] if name == "cpu" else [("cuda", pytest.mark.gpu)])
    )
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Moved:
    return Moved(*request.param)


@pytest.mark.parametrize("name", CASES)
def test_run(backend: Moved, name: str) -> None:
    check_run(backend, CASES[name])


@pytest.mark.parametrize("has_correction", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(backend: Moved, name: str, has_correction: bool) -> None:
    check_route(backend, ROUTINGS[name], has_correction=has_correction)


def test_equal_scores_go_to_the_first_experts(backend: Moved) -> None:
    ids, weights = backend.route(torch.zeros(2, 6), None, Routing(6, 3, num_groups=3, top_groups=2, normalise=True))
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_ranks_with_a_part_of_the_experts_sum_to_the_whole(backend: Moved) -> None:
    case = Case(num_experts=6, top_k=3)
    world = World(case)
    sides = world.gate_up.stacked, world.down.stacked
    total = torch.zeros_like(world.x)
    for first in (0, 3):
        gate_up, down = (type(side)(side.storage, side.data[first : first + 3]) for side in sides)
        part = backend.prepare(ExpertWeights(gate_up, down, case.act, case.dtype, first))
        total += backend.run(world.x, world.routed, part)
    torch.testing.assert_close(total.double(), world.reference(), atol=1e-5, rtol=1e-4)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    """Of the CPU's compiled product."""
    world = World(Case(num_tokens=12, top_k=3))
    backend: MoeBackend = plugins.load("kernels.moe", "cpu")()
    prepared = backend.prepare(world.weights())
    whole = backend.run(world.x, world.routed, prepared)
    for token in range(12):
        alone = Routed(world.routed.ids[token : token + 1], world.routed.weights[token : token + 1])
        assert torch.equal(backend.run(world.x[token : token + 1], alone, prepared)[0], whole[token])


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_mxfp4_stays_packed(name: str) -> None:
    case = CASES["mxfp4"]
    weights = World(case).weights()
    prepared = plugins.load("kernels.moe", name)().prepare(weights)
    num_weights = case.num_experts * case.hidden * 3 * case.inner
    packed_bytes = num_weights // 2 + num_weights // 32
    held = prepared.gate_up.size_bytes + prepared.down.size_bytes
    assert held == packed_bytes + 4 * case.num_experts * (2 * case.inner + case.hidden)  # and the biases


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "limit"), [(50, 4096), (50, 0), (3, 4096)])
def test_sorting(monkeypatch: pytest.MonkeyPatch, device: str, num_tokens: int, limit: int) -> None:
    """Each pair of this rank's experts is in one tile of its expert, by one program and by several."""
    from headrace.kernels.moe import _triton_route

    monkeypatch.setattr(_triton_route, "ONE_PROGRAM_PAIRS", limit)
    ids = torch.randint(7, (num_tokens, 3), generator=torch.Generator().manual_seed(num_tokens)).int()
    tiles = _triton_route.launch_sort(ids.to(device), num_experts=4, first_expert=2, rows=16)
    found: list[int] = []
    for expert, pairs in zip(tiles.experts.tolist(), tiles.pairs.view(-1, 16).tolist()):
        used = [pair for pair in pairs if pair < ids.numel()]
        assert (expert >= 0) == bool(used)
        assert all(int(ids.flatten()[pair]) - 2 == expert for pair in used)
        found += used
    assert sorted(found) == [pair for pair, expert in enumerate(ids.flatten().tolist()) if 2 <= expert < 6]


@pytest.mark.parametrize("is_weights_first", [False, True])
@pytest.mark.parametrize(
    "name", ["half", "cut, interleaved, with biases", "fp8 by output", "fp8 blocks", "mxfp4, half"]
)
@pytest.mark.parametrize("device", DEVICES)
def test_either_side_may_be_the_wide_one(
    device: str, name: str, is_weights_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace.kernels.moe._triton_grouped as grouped

    tuning = grouped.GroupedTuning(64, 64, 4, 2, is_weights_first)
    monkeypatch.setattr(grouped, "tuned", lambda *_, **__: tuning)
    check_run(Moved("triton", device), CASES[name])


def test_fixed_tiles_are_the_same_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.kernels.moe.triton as module
    from headrace.kernels.moe.fixed import FixedMoe

    seen: list[list[object]] = []
    launches = {name: getattr(module, name) for name in ("launch_grouped", "launch_packed")}

    for name, launch in launches.items():

        def launched(*args: Any, tuning: object, launch: Any = launch) -> Tensor:
            seen[-1].append(tuning)
            return launch(*args, tuning=tuning)

        monkeypatch.setattr(module, name, launched)
    for num_tokens in (1, 40):
        seen.append([])
        check_run(FixedMoe(), replace(CASES["mxfp4, half"], num_tokens=num_tokens))
    assert seen[0] == seen[1] and len({type(tuning) for tuning in seen[0]}) == 2  # one side of this case is packed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_inputs", [32, 64])
def test_every_code_of_mxfp4(device: str, dtype: torch.dtype, num_inputs: int) -> None:
    """A unit vector reads one column of a weight: all sixteen codes with scales from tiny to large. Of 64 inputs the
    weight is repacked."""
    from headrace.kernels.moe._triton_packed import Packed
    from headrace.kernels.moe._triton_route import launch_sort
    from headrace.kernels.moe.port import ExpertAct, Stacked
    from headrace.kernels.moe.triton import TritonMoe
    from tests.kits.moe import E2M1

    blocks = num_inputs // 32
    codes = torch.arange(16).repeat(num_inputs // 16)
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).expand(1, 16, num_inputs // 2).contiguous()
    exponents = torch.arange(98, 130, 2).view(1, 16, 1).expand(1, 16, blocks) - torch.arange(blocks) * 3
    stacked = Stacked("mxfp4", packed.to(device), exponents.to(torch.uint8).to(device))
    backend = TritonMoe()
    side = backend.prepare(ExpertWeights(stacked, stacked, ExpertAct(is_gated=False), dtype)).down
    assert isinstance(side, Packed) == (num_inputs == 64)
    ids = torch.zeros(num_inputs, 1, dtype=torch.int32, device=device)
    tiles = launch_sort(ids, num_experts=1, first_expert=0, rows=16)
    unit = torch.eye(num_inputs, device=device, dtype=dtype)
    out = backend.product(unit, side, tiles, num_inputs, out_dtype=torch.float32)
    scales = 2.0 ** (exponents[0].float() - 127).repeat_interleave(32, 1)  # [16, inputs]
    expected = (torch.tensor(E2M1)[codes] * scales).T
    torch.testing.assert_close(out.cpu(), expected, atol=0, rtol=0)


def test_what_cannot_be_repacked() -> None:
    """Scales above 2, whose products with 2 ** 126 no bfloat16 holds, and inputs that are no multiple of 64."""
    from headrace.kernels.moe._triton_packed import can_pack
    from headrace.kernels.moe.port import Stacked

    def side(num_inputs: int, exponent: int) -> Stacked:
        scales = torch.full((2, 8, num_inputs // 32), 120, dtype=torch.uint8)
        scales[1, 3, 0] = exponent
        return Stacked("mxfp4", torch.zeros(2, 8, num_inputs // 2, dtype=torch.uint8), scales)

    assert can_pack(side(128, 128)) and not can_pack(side(128, 129)) and not can_pack(side(96, 120))
