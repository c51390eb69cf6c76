"""The recipes of codes: int8_weight, int4_weight and gguf."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from headrace import plugins
from headrace.kernels._native import library
from headrace.quant.gguf import Gguf, can_decode, decode

needs_library = pytest.mark.skipif(library() is None, reason="no C compiler: weights stay dense")

FLOATS_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block's float16 values are."""


class Act(NamedTuple):
    data: Tensor
    scales: Tensor | None = None


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_stored(qtype: str, num_rows: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Random blocks, and the float32 weight that the gguf package reads from them."""
    from gguf import GGML_QUANT_SIZES

    kind = GGMLQuantizationType[qtype]
    elements, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(qtype) + in_features)
    blocks = rng.integers(0, 256, (num_rows, in_features // elements, block_bytes), dtype=np.uint8)
    for at in FLOATS_AT[qtype]:
        blocks[..., at : at + 2] = rng.normal(size=(*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
    stored = np.reshape(blocks, (num_rows, -1))
    return torch.from_numpy(stored), torch.from_numpy(dequantize(stored, kind))


def assert_near(out: Tensor, wanted: Tensor) -> None:
    """Within what rounding the activations may do."""
    assert (out - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("qtype", FLOATS_AT)
def test_a_files_blocks_are_kept_exactly(qtype: str) -> None:
    stored, wanted = draw_stored(qtype, 37, 512)
    assert torch.equal(decode(qtype, stored).weight(), wanted)
    recipe = Gguf()
    prepared = recipe.prepare_stored([(qtype, stored)], None, dtype=torch.float32)
    assert (prepared.out_features, prepared.in_features) == (37, 512)
    ids = torch.tensor([36, 0, 5, 5])
    assert torch.equal(recipe.rows(prepared, ids), wanted[ids])
    x = draw(6, 512)
    assert_near(recipe.linear(Act(x), prepared), x @ wanted.t())


def test_fused_parts_of_different_types() -> None:
    parts = [
        ("Q5_0", draw_stored("Q5_0", 20, 256)),
        ("Q4_1", draw_stored("Q4_1", 9, 256)),
        ("Q6_K", draw_stored("Q6_K", 4, 256)),
    ]
    recipe, bias = Gguf(), draw(33)
    prepared = recipe.prepare_stored([(qtype, part[0]) for qtype, part in parts], bias, dtype=torch.bfloat16)
    wanted = torch.cat([part[1] for _, part in parts])
    assert torch.equal(recipe.rows(prepared, torch.arange(33)), wanted.bfloat16())
    x = draw(2, 256)
    assert_near(recipe.linear(Act(x), prepared), x @ wanted.t() + bias)


def test_unknown_types_are_told() -> None:
    assert can_decode("Q4_K") and not can_decode("IQ2_XS") and not can_decode("BF16")


@pytest.mark.parametrize(("name", "step"), [("int8_weight", 1 / 127), ("int4_weight", 1 / 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_made_codes_are_near_the_weight(name: str, step: float, dtype: torch.dtype) -> None:
    recipe = plugins.load("quant", name)()
    weight = draw(50, 96).to(dtype)
    weight[7], weight[8, :32] = 0, 0.25
    prepared = recipe.prepare(weight, None)
    rows = recipe.rows(prepared, torch.arange(50)).float()
    groups = weight.float().unflatten(1, (-1, 32))
    spread = groups.abs().amax(2) if name == "int8_weight" else groups.amax(2) - groups.amin(2)
    allowed = 0.52 * step * spread + 0.005 * groups.abs().amax(2)
    assert ((rows - weight.float()).unflatten(1, (-1, 32)).abs().amax(2) <= allowed).all()
    assert (rows[7] == 0).all() and (rows[8, :32] - 0.25).abs().max() < 0.001
    x = draw(4, 96, seed=1).to(dtype)
    out = recipe.linear(Act(x), prepared)
    assert out.dtype == dtype
    assert_near(out.float(), x.float() @ rows.t())


@needs_library
@pytest.mark.parametrize(("name", "bits"), [("int8_weight", 8.5), ("int4_weight", 5)])
def test_memory(name: str, bits: float) -> None:
    prepared = plugins.load("quant", name)().prepare(draw(64, 256), None)
    assert prepared.size_bytes == 64 * 256 * bits / 8


@pytest.mark.parametrize("name", ["int8_weight", "int4_weight"])
def test_inputs_that_fill_no_groups_stay_dense(name: str) -> None:
    recipe = plugins.load("quant", name)()
    weight = draw(10, 40)
    prepared = recipe.prepare(weight, None)
    assert torch.equal(recipe.rows(prepared, torch.arange(10)), weight)
    x = draw(3, 40, seed=1)
    torch.testing.assert_close(recipe.linear(Act(x), prepared), x @ weight.t(), atol=1e-5, rtol=1e-5)
