"""FP8 recipes: from a checkpoint's tensors to a product, and a whole model of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.build import build_model
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config
from headrace.hub.source import resolve_model
from headrace.kernels.quantise import FP8, Form, Quantised, dequantise, quantise_twin
from headrace.layers.factory import LayerFactory
from headrace.layers.recipes import read_recipes
from headrace.quant._fp8 import Fp8Weight
from headrace.quant.fp8 import Fp8
from headrace.quant.fp8_block import Fp8Block
from headrace.quant.fp8_dynamic import Fp8Dynamic
from headrace.quant.fp8_on_load import Fp8OnLoad
from tests.kits.model import Row, Sequences, load_model, prompt, save_tiny


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load(recipe: Any, tensors: Mapping[str, Tensor], widths: tuple[int, ...]) -> Any:
    return recipe.load(tensors, None, widths=widths, dtype=torch.float32)


def test_static_scales_of_fused_weights_become_one() -> None:
    weight = (draw(6, 32) * 50).to(FP8)
    tensors = {
        "weight": weight.clone(),
        "weight_scale": torch.tensor([0.5, 0.25]),
        "input_scale": torch.tensor([0.01, 0.03]),
    }
    prepared = load(Fp8(), tensors, (4, 2))
    plain = weight.float() * torch.tensor([0.5] * 4 + [0.25] * 2)[:, None]
    assert isinstance(prepared, Fp8Weight) and prepared.scales.tolist() == [0.5]
    torch.testing.assert_close(Fp8().rows(prepared, torch.arange(6)), plain, atol=1e-3, rtol=0.07)
    assert torch.equal(prepared.weight[:4].view(torch.uint8), weight[:4].view(torch.uint8))
    form = Fp8().wanted(prepared)
    assert form.kind == "static" and form.scale is not None and form.scale.tolist() == [pytest.approx(0.03)]

    x = draw(3, 32, seed=1)
    act = quantise_twin(x, form)
    wanted = dequantise(act) @ Fp8().rows(prepared, torch.arange(6)).t()
    for given in (Quantised(x), act):
        torch.testing.assert_close(Fp8().linear(given, prepared), wanted)


@pytest.mark.parametrize("by_output", [True, False])
def test_dynamic(by_output: bool) -> None:
    weight, recipe = (draw(6, 32) * 50).to(FP8), Fp8Dynamic(by_output=by_output)
    scales = draw(6, 1, seed=2).abs() if by_output else torch.tensor([0.5, 0.25])
    by_row = scales if by_output else torch.tensor([0.5] * 4 + [0.25] * 2)[:, None]
    prepared = load(recipe, {"weight": weight, "weight_scale": scales}, (4, 2))
    x = draw(3, 32, seed=1)
    wanted = dequantise(quantise_twin(x, Form("token"))) @ (weight.float() * by_row).t()
    torch.testing.assert_close(recipe.linear(Quantised(x), prepared), wanted)
    torch.testing.assert_close(
        recipe.linear(Quantised(x), prepared), x @ (weight.float() * by_row).t(), atol=9, rtol=0.1
    )


def test_blocks() -> None:
    weight, scales = (draw(200, 256) * 50).to(FP8), draw(2, 2, seed=2).abs()
    prepared = load(Fp8Block(), {"weight": weight, "weight_scale_inv": scales}, (128, 72))
    x = draw(3, 256, seed=1)
    wide = weight.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    wanted = dequantise(quantise_twin(x, Form("group"))) @ wide.t()
    torch.testing.assert_close(Fp8Block().linear(Quantised(x), prepared), wanted)
    with pytest.raises(ValueError, match="doesn't fill blocks of 128"):
        load(Fp8Block(), {"weight": weight, "weight_scale_inv": scales}, (72, 128))


def test_made_at_load() -> None:
    weight = draw(6, 32) * torch.tensor([[1e-6], [1.0], [1e3], [0.0], [1.0], [1.0]])
    recipe = Fp8OnLoad()
    prepared = load(recipe, {"weight": weight}, (6,))
    torch.testing.assert_close(recipe.rows(prepared, torch.arange(6)), weight, atol=1e-8, rtol=0.07)
    assert prepared.size_bytes == 6 * 32 + 6 * 4


def test_a_damaged_scale_is_refused() -> None:
    tensors = {"weight": draw(2, 16).to(FP8), "weight_scale": torch.tensor([0.0]), "input_scale": torch.tensor([1.0])}
    with pytest.raises(ValueError, match="weight_scale that is not a positive number"):
        load(Fp8(), tensors, (2,))


def quantise_checkpoint(folder: Path, form: str) -> dict[str, Any]:
    """Rewrite a checkpoint's linears as a form stores them. -> what hf_quant_config.json would hold"""
    stored: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = value
            continue
        base = name.removesuffix("weight")
        scale = value.abs().amax(1, keepdim=True) / 448 if form == "channel" else value.abs().max() / 448
        stored[name] = (value / scale).to(FP8)
        stored[f"{base}weight_scale"] = scale.clone()
        if form == "static":
            stored[f"{base}input_scale"] = torch.tensor(0.05)
        if "k_proj" in name:
            stored[f"{base}k_scale"] = torch.tensor([0.5])
        if "v_proj" in name:
            stored[f"{base}v_scale"] = torch.tensor(0.25)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return {"quantization": {"quant_algo": "FP8" if form == "static" else "FP8_PER_CHANNEL_PER_TOKEN"}}


@pytest.mark.parametrize("form", ["static", "channel", "on load"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_a_model_with_fp8_linears(tmp_path: Path, form: str, kv_dtype: torch.dtype) -> None:
    """Close to the plain model, and not equal to it."""
    save_tiny(tmp_path, "llama", rms_norm_eps=1e-6)
    source = resolve_model(str(tmp_path))
    plain, _ = load_model(source)
    stated = None if form == "on load" else quantise_checkpoint(tmp_path, form)
    recipes = read_recipes({}, hf_quant_config=stated, force_dynamic=form == "on load")
    model = build_model(read_config(source), LayerFactory(dtype=torch.float32, recipe=recipes))
    load_weights(model, source, progress=False)
    stated_scales = (1.0, 1.0) if form == "on load" else (0.5, 0.25)
    assert (model.layers[1].spec.k_scale, model.layers[1].spec.v_scale) == stated_scales

    ids = prompt(20)
    (wanted,) = Sequences(plain).step([(Row(), ids)])
    sequences, row = Sequences(model, dtype=kv_dtype), Row()
    parts = [sequences.step([(row, ids[at : at + 7])])[0] for at in range(0, 20, 7)]
    error = (torch.cat(parts) - wanted).norm() / wanted.norm()
    assert 1e-3 < error < 0.12, error
