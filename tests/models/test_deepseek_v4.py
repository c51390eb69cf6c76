"""DeepSeek-V4 as published: other keys and names, FP8 blocks and experts in MXFP4 behind scales of eight bits; its
residual streams; and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.build import build_model
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config, stated_quantisation
from headrace.hub.read_shape import read_shape
from headrace.hub.source import resolve_model
from headrace.kernels.moe._twin import dequantised_mxfp4
from headrace.layers.experts import ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.hyper import StreamSizes, hyper_connection, hyper_head, joined
from headrace.layers.recipes import read_recipes
from headrace.quant.none import Dense
from tests.kits.model import Row, Sequences, check_decode, check_prefill, load_case, load_model, prompt, save_tiny
from tests.kits.tiny import YARN

FILE = "model.safetensors"
BLOCK = 128
PUBLISHED = {"model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_", "model.": ""}


def published_name(name: str) -> str:
    for old, new in PUBLISHED.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def publish(folder: Path) -> None:
    """The bare names, the older keys, and a module for speculation."""
    tensors = {published_name(name): value for name, value in load_file(folder / FILE).items()}
    save_file({**tensors, "mtp.0.enorm.weight": torch.ones(3)}, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "partial_rotary_factor", "rope_parameters", "compress_rates"):
        del config[key]
    rope = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    config |= {
        "compress_ratios": [0, 4, 128, 4, 0], "compress_rate_csa": 2, "compress_rate_hca": 6, "num_hash_layers": 2,
        "qk_rope_head_dim": 4, "rope_scaling": {**rope, "type": "yarn"}, "compress_rope_theta": 1000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_a_published_checkpoint(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    oracle = save_tiny(tmp_path, "deepseek_v4", mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"])
    publish(tmp_path)
    case = load_case(resolve_model(str(tmp_path)), oracle)
    check_prefill(case)
    check_decode(case, num_tokens=8)
    assert case.model.weight_map().is_kept("mtp.0.enorm.weight")
    config = read_config(case.source)
    assert [len(layer.mixer.parts) for layer in read_shape(config).layers] == [1, 3, 3, 3]  # type: ignore[union-attr]


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(FP8, scales that are powers of two, by 128 x 128; what they stand for)"""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.ones(rows, columns)
    wide = torch.zeros_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = torch.exp2(torch.ceil(torch.log2(weight[place].abs().max() / 448)))
            wide[place] = scales[row, column]
    stored = (weight / wide).to(torch.float8_e4m3fn)
    return stored, scales.to(torch.float8_e8m0fnu), stored.float() * wide


def in_codes(weight: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(two codes a byte, scales by 32 inputs, what they stand for), of any values"""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = weight.shape
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 124, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    meant = dequantised_mxfp4(codes, scales)
    return codes.view(torch.int8), scales.view(torch.float8_e8m0fnu), meant


WIDE: dict[str, Any] = {
    "hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128, "head_dim": 64, "o_lora_rank": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 4, "index_topk": 64, "index_head_dim": 32, "hc_mult": 2,
    "partial_rotary_factor": 0.25, "num_hidden_layers": 2, "mlp_layer_types": ["hash_moe", "moe"],
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"], "swiglu_limit": 10.0,
}  # fmt: skip
"""Nothing is chosen: what rounding moves would not be a little thing then."""
LINEARS = ("wq_a.", "wq_b.", "attn.wkv.", "wo_a.", "wo_b.", "shared_experts.")


def test_eight_and_four_bits(tmp_path: Path) -> None:
    """The forms of the published checkpoints load as the values that they stand for."""
    torch.set_num_threads(1)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    save_tiny(packed, "deepseek_v4", **WIDE)
    plain.mkdir()
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for at, (name, value) in enumerate(load_file(packed / FILE).items()):
        scale = f"{name.removesuffix('weight')}scale"
        if ".ffn.experts." in name:
            stored[name], stored[scale], meant[name] = in_codes(value, at)
        elif name.endswith(".weight") and any(part in name for part in LINEARS):
            stored[name], stored[scale], meant[name] = in_blocks(value * 0.4)
        else:
            stored[name] = meant[name] = value
    save_file(stored, packed / FILE)
    save_file(meant, plain / FILE)
    config = json.loads((packed / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    method = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": method, "expert_dtype": "fp4"}))
    source = resolve_model(str(packed))
    config = read_config(source)
    assert read_shape(config).storage.name == "fp8, mxfp4 experts"
    recipes = read_recipes({"quantization_config": stated_quantisation(config)})
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=ExpertsSetup(recipes.of_experts))
    model: Any = build_model(config, factory)
    load_weights(model, source, progress=False)
    same: Any = load_model(resolve_model(str(plain)))[0]
    ids = prompt(20)
    (got,), (expected,) = (Sequences(each).step([(Row(), ids)]) for each in (model, same))
    assert float((got - expected).norm() / expected.norm()) < 0.1  # inputs are rounded to FP8 too
    assert model.layers[0].mlp.experts.routed.ready().gate_up.storage == "mxfp4"
    torch.testing.assert_close(
        model.layers[0].attention.out_groups._weight, same.layers[0].attention.out_groups._weight
    )


def test_streams_are_mixed_as_transformers_mixes_them() -> None:
    """With weights large enough that a step of the balancing matters."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

    torch.manual_seed(0)
    config = DeepseekV4Config(hidden_size=12, hc_mult=3, hc_sinkhorn_iters=5, num_hidden_layers=1)
    block, end = DeepseekV4HyperConnection(config).float(), DeepseekV4HyperHead(config).float()
    factory = LayerFactory(dtype=torch.float32, recipe=lambda _: Dense())
    sizes = StreamSizes(12, 3, 5, config.hc_eps, config.rms_norm_eps)
    ours, our_end = hyper_connection(factory, "h", sizes), hyper_head(factory, "e", sizes)
    with torch.no_grad():
        for theirs, mine, prefix in ((block, ours, ""), (end, our_end, "hc_")):
            for part, value in theirs.named_parameters():
                value.copy_(torch.randn_like(value))
                (parameter,) = [each for each in mine.weights.parameters if each.name[2:] == part.removeprefix(prefix)]
                parameter.view(parameter.slot("")).copy_(value)
                parameter.mark_loaded(parameter.slot(""))
            mine.weights.finish()
        streams, out = torch.randn(7, 3, 12), torch.randn(7, 12)
        post, comb, seen = block(streams[None])
        expected = post.unsqueeze(-1) * out[None].unsqueeze(-2) + comb.transpose(-1, -2) @ streams[None]
        got, joint = ours.open(streams)
        torch.testing.assert_close(got, seen[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(joined(joint, out, streams), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(our_end(streams), end(streams[None])[0], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("config")
    save_tiny(folder, "deepseek_v4")
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types must state sliding_attention or compressed"),
        ({"layer_types": None, "compress_ratios": [0, 4, 8, 4]}, "compress_ratios must state one of 0, 4, 128"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types must state hash_moe or moe"),
        ({"o_groups": 3}, "o_groups 3 does not divide num_attention_heads 8"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1, not 2"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not known"),
        ({"compress_rates": {"compressed_sparse_attention": 1, "heavily_compressed_attention": 6}}, "at least 2"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "lacks the key 'heavily_compressed_attention'"),
        ({"swiglu_limit": 0}, "swiglu_limit must be greater than 0"),
        ({"num_experts_per_tok": 9}, "9 experts a token, but there are only 8"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model({**config, **changes}, LayerFactory(dtype=torch.float32, recipe=lambda _: Dense()))
