"""The experts layer: both forms of checkpoints, shares of ranks, recipes, and what is refused."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.engine import checkpoint
from headrace.engine.weights import load_weights
from headrace.hub.source import ModelSource
from headrace.kernels.moe.port import ExpertAct, Routing, Stacked
from headrace.kernels.quantise import FP8
from headrace.layers import experts_backend
from headrace.layers.experts import Experts, ExpertsSetup, expert_rules
from headrace.layers.experts_backend import find_backend
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act
from headrace.layers.stacked import ExpertsShare, Side, StackedLinear
from headrace.layers.weights import WeightMap
from headrace.quant.fp8_block import Fp8Block
from headrace.quant.fp8_dynamic import Fp8Dynamic
from headrace.quant.fp8_on_load import Fp8OnLoad
from headrace.quant.int4_weight import Int4Weight
from headrace.quant.mxfp4 import Mxfp4
from headrace.quant.none import Dense

EXPERTS, HIDDEN, INNER = 5, 16, 12
RULES = {
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
    **expert_rules("model.layers.*.moe", "layers.*.mlp", names=("w1", "w3", "w2")),
}
ROUTING = Routing(EXPERTS, 2, normalise=True)


@dataclass
class Holder:
    """As much of a model as the loader asks for."""

    weights: WeightMap

    def weight_map(self) -> WeightMap:
        return self.weights


def build(
    *,
    recipe: object | None = None,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    hidden: int = HIDDEN,
    inner: int = INNER,
    setup: ExpertsSetup | None = None,
    **options: Any,
) -> tuple[Experts, Holder]:
    chosen: Any = recipe or Dense()
    factory = LayerFactory(dtype=dtype, recipe=lambda name: chosen, parallel=parallel, experts=setup)
    factory.read(WeightMap((), RULES))
    made = factory.experts(
        "layers.0.mlp", hidden_size=hidden, intermediate_size=inner, **{"routing": ROUTING, **options}
    )
    return made, Holder(factory.weight_map())


def load(holder: Holder, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({f"model.layers.0.{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    load_weights(holder, ModelSource(kind="hf", path=folder, name=str(folder)), progress=False)  # type: ignore[arg-type]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.4


ROUTER = draw(EXPERTS, HIDDEN, seed=1)
GATE, UP, DOWN = (
    draw(EXPERTS, INNER, HIDDEN, seed=2),
    draw(EXPERTS, INNER, HIDDEN, seed=3),
    draw(EXPERTS, HIDDEN, INNER),
)
X = draw(6, HIDDEN, seed=9)


def by_expert(gate: Tensor = GATE, up: Tensor = UP, down: Tensor = DOWN) -> dict[str, Tensor]:
    """Clones: the writer refuses tensors that share memory."""
    named = {"mlp.gate.weight": ROUTER.clone()}
    for expert in range(len(gate)):
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        named |= {f"mlp.experts.{expert}.{name}.weight": part[expert].clone() for name, part in parts.items()}
    return named


def fused() -> dict[str, Tensor]:
    return {
        "mlp.gate.weight": ROUTER.clone(),
        "mlp.experts.gate_up_proj": torch.cat((GATE, UP), 1),
        "mlp.experts.down_proj": DOWN.clone(),
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    made, holder = build()
    load(holder, tmp_path_factory.mktemp("experts"), by_expert())
    return made(Act(X))


def test_is_the_weighted_sum_of_mlps(expected: Tensor) -> None:
    scores = torch.softmax(X @ ROUTER.t(), -1)
    values, ids = scores.topk(2, -1)
    wanted = torch.zeros_like(X)
    for token, choice in itertools.product(range(len(X)), range(2)):
        expert = int(ids[token, choice])
        inner = torch.nn.functional.silu(GATE[expert] @ X[token]) * (UP[expert] @ X[token])
        wanted[token] += values[token, choice] / values[token].sum() * (DOWN[expert] @ inner)
    torch.testing.assert_close(expected, wanted, atol=1e-6, rtol=1e-5)


def test_other_names_and_forms_of_the_same_weights(tmp_path: Path, expected: Tensor) -> None:
    old_names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    renamed = {name.replace("mlp.", "moe."): value for name, value in by_expert().items()}
    for new, old in old_names.items():
        renamed = {name.replace(old, new): value for name, value in renamed.items()}
    turned = {
        name: value.transpose(1, 2).contiguous() if value.dim() == 3 else value for name, value in fused().items()
    }
    cases: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
        (renamed, {}),
        (fused(), {}),
        (turned, {"fused": "in_out"}),
    ]
    for tensors, options in cases:
        made, holder = build(**options)
        load(holder, tmp_path, tensors)
        assert torch.equal(made(Act(X)), expected)


def test_alternating_rows(tmp_path: Path) -> None:
    """gpt-oss's layout, from one tensor and from one an expert."""
    act = ExpertAct(is_interleaved=True)
    bias = draw(EXPERTS, 2 * INNER, seed=5)
    rows = torch.stack((GATE, UP), 2).flatten(1, 2)  # [experts, 2 * inner, hidden]
    whole = {
        "mlp.gate.weight": ROUTER,
        "mlp.experts.gate_up_proj": rows.transpose(1, 2).contiguous(),
        "mlp.experts.gate_up_proj_bias": bias,
        "mlp.experts.down_proj": DOWN.transpose(1, 2).contiguous(),
        "mlp.experts.down_proj_bias": draw(EXPERTS, HIDDEN, seed=6),
    }
    apart = by_expert()
    for expert in range(EXPERTS):
        apart[f"mlp.experts.{expert}.gate_proj.bias"] = bias[expert, ::2].clone()
        apart[f"mlp.experts.{expert}.up_proj.bias"] = bias[expert, 1::2].clone()
        apart[f"mlp.experts.{expert}.down_proj.bias"] = whole["mlp.experts.down_proj_bias"][expert].clone()
    results = []
    for size, tensors in itertools.product((1, 3), (whole, apart)):
        total = torch.zeros_like(X)
        for rank in range(size):
            made, holder = build(act=act, bias=True, fused="in_out", parallel=ParallelContext(rank, size))
            load(holder, tmp_path, tensors)
            total += made(Act(X))
        results.append(total)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("is_fused", [False, True])
def test_ranks_sum_to_the_whole(tmp_path: Path, expected: Tensor, size: int, is_fused: bool) -> None:
    total = torch.zeros_like(X)
    for rank in range(size):
        made, holder = build(parallel=ParallelContext(rank, size))
        assert holder.weights.weight_bytes < 4 * (ROUTER.numel() + 3 * GATE.numel() * (1 / size + 0.1))
        load(holder, tmp_path, fused() if is_fused else by_expert())
        total += made(Act(X))
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=1e-5)


def test_a_rank_with_some_experts_reads_only_theirs(tmp_path: Path) -> None:
    """The place of expert parallelism: names of all experts are known, bytes of its own are kept."""
    share = ExpertsShare((1, 3), (0, INNER))
    for tensors in (by_expert(), fused()):
        module = FirstProduct(share)
        firsts = {name: value for name, value in tensors.items() if "down" not in name and ".gate." not in name}
        load(Holder(WeightMap([module], RULES)), tmp_path, firsts)
        assert module.stacked is not None
        assert torch.equal(module.stacked.data, torch.cat((GATE, UP), 1)[1:3])


class FirstProduct:
    """Of some experts."""

    def __init__(self, share: ExpertsShare) -> None:
        self.linear = StackedLinear(
            "layers.0.mlp.gate_up", Side(("gate", "up"), INNER, HIDDEN, 0), num_experts=EXPERTS, share=share,
            recipe=Dense(), bias=False, dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        self.parameters = self.linear.parameters
        self.stacked: Stacked | None = None

    def finish(self) -> None:
        self.stacked = self.linear.stack()


def test_shared_expert_and_its_gate(tmp_path: Path, expected: Tensor) -> None:
    shared = {name: draw(*shape, seed=7) for name, shape in
              {"gate_proj": (8, HIDDEN), "up_proj": (8, HIDDEN), "down_proj": (HIDDEN, 8)}.items()}  # fmt: skip
    gate = draw(1, HIDDEN, seed=8)
    named = {f"mlp.shared_experts.{name}.weight": value for name, value in shared.items()}
    made, holder = build(shared_size=8, has_shared_gate=True)
    load(holder, tmp_path, {**by_expert(), **named, "mlp.shared_experts_gate.weight": gate})
    inner = torch.nn.functional.silu(X @ shared["gate_proj"].t()) * (X @ shared["up_proj"].t())
    wanted = expected + inner @ shared["down_proj"].t() * torch.sigmoid(X @ gate.t())
    torch.testing.assert_close(made(Act(X)), wanted, atol=1e-6, rtol=1e-5)


def test_many_tokens_are_split(tmp_path: Path, expected: Tensor) -> None:
    made, holder = build(setup=ExpertsSetup(max_num_tokens=4))
    load(holder, tmp_path, by_expert())
    assert torch.equal(made(Act(X)), expected)


# ---- loading is strict -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp.experts.2.up_proj.weight": None}, r"missing: model.layers.0.mlp.experts.2.up_proj.weight"),
        ({"mlp.experts.5.up_proj.weight": UP[0]}, r"unexpected: model.layers.0.mlp.experts.5.up_proj.weight"),
        ({"mlp.experts.1.down_proj.weight": UP[0]}, r"of a wrong shape: .*experts.1.down_proj.weight \[12, 16\]"),
        ({"mlp.experts.down_proj": DOWN}, r"stored twice: .*down_proj"),
    ],
)
def test_names_and_shapes(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    tensors = {name: value for name, value in {**by_expert(), **changes}.items() if value is not None}
    _, holder = build()
    with pytest.raises(ValueError, match=message):
        load(holder, tmp_path, {name: value.clone() for name, value in tensors.items()})


def test_a_count_that_is_not_the_tensors(tmp_path: Path) -> None:
    _, holder = build(routing=Routing(EXPERTS + 1, 2))
    with pytest.raises(ValueError, match=r"experts.gate_up_proj \[5, 24, 16\] instead of \[6, 24, 16\]"):
        load(holder, tmp_path, fused())
    with pytest.raises(ValueError, match=r"missing: model.layers.0.mlp.experts.5.gate_proj.weight"):
        load(holder, tmp_path, by_expert())


def test_one_expert_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor that holds all, runs of experts pass through the file's buffer."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 4 * 2 * INNER * HIDDEN)
    sizes: list[int] = []
    read = checkpoint.SafetensorsFile.read

    def spy(self: checkpoint.SafetensorsFile, offset: int, size_bytes: int) -> memoryview:
        sizes.append(size_bytes)
        return read(self, offset, size_bytes)

    monkeypatch.setattr(checkpoint.SafetensorsFile, "read", spy)
    _, holder = build()
    load(holder, tmp_path, fused())
    assert max(sizes) == 4 * 2 * INNER * HIDDEN and sizes.count(max(sizes)) >= EXPERTS


# ---- recipes ---------------------------------------------------------------------------------


def close(made: Experts, plain: Experts, x: Tensor, *, tolerance: float) -> None:
    got, wanted = made(Act(x)), plain(Act(x))
    assert float((got - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("size", [1, 2])
def test_fp8_by_block_and_its_ranks(tmp_path: Path, size: int) -> None:
    hidden, inner = 128, 256
    router = draw(EXPERTS, hidden)
    stored: dict[str, Tensor] = {"mlp.gate.weight": router}
    plain = {"mlp.gate.weight": router.clone()}
    for expert, (name, shape) in itertools.product(
        range(EXPERTS), {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}.items()
    ):
        key = f"mlp.experts.{expert}.{name}"
        codes = (draw(*shape, seed=expert) * 50).to(FP8)
        scales = torch.rand(shape[0] // 128, shape[1] // 128) * 0.01
        stored |= {f"{key}.weight": codes, f"{key}.weight_scale_inv": scales}
        plain[f"{key}.weight"] = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    reference, holder = build(hidden=hidden, inner=inner)
    load(holder, tmp_path, plain)
    total = torch.zeros(6, hidden)
    for rank in range(size):
        made, holder = build(recipe=Fp8Block(), hidden=hidden, inner=inner, parallel=ParallelContext(rank, size))
        load(holder, tmp_path, stored)
        total += made(Act(draw(6, hidden)))
    wanted = reference(Act(draw(6, hidden)))
    assert float((total - wanted).norm() / wanted.norm()) < 0.05


def test_fp8_with_one_scale_a_weight(tmp_path: Path) -> None:
    """Gate and up keep the scales of their own."""
    stored = by_expert()
    for name in [name for name in stored if "experts" in name]:
        scale = stored[name].abs().max() / 448 * (3.0 if "up_proj" in name else 1.0)
        stored[name], stored[f"{name}_scale"] = (stored[name] / scale).to(FP8), scale.view(1)
    made, holder = build(recipe=Fp8Dynamic(by_output=False))
    load(holder, tmp_path, stored)
    plain, holder = build()
    load(holder, tmp_path, by_expert())
    close(made, plain, X, tolerance=0.08)


def test_fp8_made_at_load(tmp_path: Path) -> None:
    made, holder = build(recipe=Fp8OnLoad())
    load(holder, tmp_path, by_expert())
    plain, holder = build()
    load(holder, tmp_path, by_expert())
    close(made, plain, X, tolerance=0.08)


def test_a_rank_may_not_cut_a_block() -> None:
    """Shares are whole blocks of 32 inputs; 12 such blocks on 5 ranks are 3 or 2 each."""
    widths = []
    for rank in range(5):
        _, holder = build(recipe=Mxfp4(), hidden=64, inner=12 * 32, parallel=ParallelContext(rank, 5))
        (blocks,) = (
            parameter
            for module in holder.weights.modules
            for parameter in module.parameters
            if parameter.name == "layers.0.mlp.down.blocks"
        )
        widths.append(blocks.shape[1])
    assert widths == [3, 3, 2, 2, 2]
    with pytest.raises(ValueError, match="tensor_parallel_size 9 is too large for experts of 256 inner features"):
        build(recipe=Mxfp4(), hidden=64, inner=256, parallel=ParallelContext(8, 9))


# ---- what is refused, and backends -----------------------------------------------------------


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(4, 5), "layers.0.mlp: 5 experts a token, but there are only 4"),
        (Routing(6, 1, num_groups=4, top_groups=1), "6 experts can't be chosen from 1 of 4 equal groups"),
        (Routing(8, 1, num_groups=2, top_groups=3), "8 experts can't be chosen from 3 of 2 equal groups"),
        (Routing(4, 1, num_groups=4, top_groups=2), "groups of one expert have no two best"),
        (Routing(8, 5, num_groups=4, top_groups=2), "5 experts a token, but 2 groups have only 4"),
    ],
)
def test_routing_that_does_not_fit(routing: Routing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(routing=routing)


def test_a_recipe_that_is_not_for_experts() -> None:
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_up: experts can't be stored as Int4Weight"):
        build(recipe=Int4Weight())


def test_backends_by_name(caplog: pytest.LogCaptureFixture) -> None:
    names = {name: type(find_backend(name, "cpu")).__name__ for name in ("AUTO", "VANILLA", "cpu", "CUTLASS")}
    assert names == {"AUTO": "CpuMoe", "VANILLA": "TorchMoe", "cpu": "CpuMoe", "CUTLASS": "CpuMoe"}
    with caplog.at_level(logging.INFO, "headrace.layers"):
        experts_backend._said.clear()
        for _ in range(3):
            find_backend("TRTLLM", "cpu")
    assert [record.message for record in caplog.records] == ["moe_config.backend: TRTLLM is 'cpu' here"]
    with pytest.raises(ValueError, match="TRITON needs a GPU"):
        find_backend("TRITON", "cpu")
    with pytest.raises(ValueError, match="unknown kernels.moe plug-in 'fast'"):
        find_backend("FAST", "cpu")


def test_every_reference_name_is_mapped() -> None:
    from headrace.config.kernels import MoeBackend

    for choice in MoeBackend:
        assert find_backend(choice.value, "cuda" if choice.value == "TRITON" else "cpu") is not None
