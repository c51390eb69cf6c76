"""Write a random checkpoint of a known shape, in the layout that quantised checkpoints have on the hub.

    python benchmarks/random_checkpoint.py llama-3.1-8b FOLDER [--quant fp8] [--layers N] [--device cuda]

Weights are N(0, 0.02), never zeros: products of zeros draw less power and run faster than real ones. FP8 is ModelOpt's
layout: `weight` in float8_e4m3fn, `weight_scale` and `input_scale` as float32 scalars, `k_scale` and `v_scale` beside
the projections, hf_quant_config.json. `fp8_block` has a scale for each 128 x 128, as published by DeepSeek and Qwen;
`mxfp4` packed experts, as published by OpenAI. There is no tokenizer: measure with ids (`--skip_tokenizer_init`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FP8_MAX = 448.0
BLOCK = 128
INPUT_MAX = 8.0
"""Activations of a network with such weights stay below this; static scales are made for it."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3.3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek-v3-slice": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
QUANTS = {
    "llama": ("fp8", "none"),
    "qwen3_moe": ("fp8_block", "none"),
    "gpt_oss": ("mxfp4",),
    "deepseek_v3": ("fp8_block", "none"),
}
"""Layouts by model type, the usual one first."""


def config_of(shape: dict[str, Any], *, quant: str) -> dict[str, object]:
    quantised = {}
    if quant == "fp8_block":
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        quantised = {"quantization_config": settings}
    if quant == "mxfp4":
        quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    return {
        "architectures": [ARCHITECTURES[shape.get("model_type", "llama")]],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
        **quantised,
    }


class Writer:
    """Draws tensors on a device, one layer a file."""

    def __init__(self, folder: Path, *, quant: str, device: str) -> None:
        self.folder = folder
        self.quant = quant
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)
        self.index: dict[str, str] = {}
        self.total_bytes = 0

    def normal(self, *size: int) -> Tensor:
        drawn = torch.empty(size, dtype=torch.float32, device=self.device)
        return drawn.normal_(0, 0.02, generator=self.generator)

    def linear(self, name: str, out_features: int, in_features: int) -> Iterator[tuple[str, Tensor]]:
        weight = self.normal(out_features, in_features)
        if self.quant in ("none", "mxfp4"):
            yield f"{name}.weight", weight.bfloat16()
            return
        if self.quant == "fp8_block":
            yield from self.blocks(name, weight)
            return
        scale = weight.abs().max() / FP8_MAX
        yield f"{name}.weight", (weight / scale).to(torch.float8_e4m3fn)
        yield f"{name}.weight_scale", scale
        yield f"{name}.input_scale", torch.tensor(INPUT_MAX / FP8_MAX)

    def blocks(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A scale for each 128 x 128."""
        out_features, in_features = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -in_features % BLOCK, 0, -out_features % BLOCK))
        tiles = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = tiles.abs().amax((1, 3)) / FP8_MAX
        by_value = scales.repeat_interleave(BLOCK, 0)[:out_features].repeat_interleave(BLOCK, 1)[:, :in_features]
        yield f"{name}.weight", (weight / by_value).to(torch.float8_e4m3fn)
        yield f"{name}.weight_scale_inv", scales

    def packed(self, name: str, *size: int) -> Iterator[tuple[str, Tensor]]:
        """MXFP4 [..., in]: random codes, and scales that make them about as large as other weights."""
        shape = (*size[:-1], size[-1] // 32, 16)
        codes = torch.randint(256, shape, generator=self.generator, device=self.device, dtype=torch.uint8)
        yield f"{name}_blocks", codes
        yield f"{name}_scales", torch.full(shape[:-1], 120, dtype=torch.uint8)

    def save(self, file: str, tensors: dict[str, Tensor]) -> None:
        host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(host, self.folder / file)
        self.index.update(dict.fromkeys(host, file))
        self.total_bytes += sum(tensor.nbytes for tensor in host.values())


def layer_tensors(writer: Writer, shape: dict[str, Any], at: int) -> Iterator[tuple[str, Tensor]]:
    if "kv_lora_rank" in shape:
        yield from latent_layer(writer, shape, at)
        return
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head = shape.get("head_dim", hidden // heads)
    kv = shape["num_key_value_heads"] * head
    prefix = f"model.layers.{at}"
    attention = {"q": (heads * head, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads * head)}
    for name, size in attention.items():
        yield from writer.linear(f"{prefix}.self_attn.{name}_proj", *size)
        if shape.get("attention_bias"):
            yield f"{prefix}.self_attn.{name}_proj.bias", writer.normal(size[0]).bfloat16()
    if writer.quant == "fp8":
        yield f"{prefix}.self_attn.k_proj.k_scale", torch.tensor(INPUT_MAX / FP8_MAX)
        yield f"{prefix}.self_attn.v_proj.v_scale", torch.tensor(INPUT_MAX / FP8_MAX)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    model_type = shape.get("model_type", "llama")
    if model_type == "qwen3_moe":
        yield from qwen3_experts(writer, shape, prefix)
    elif model_type == "gpt_oss":
        yield from gpt_oss_experts(writer, shape, prefix)
    else:
        yield from mlp(writer, f"{prefix}.mlp", hidden, shape["intermediate_size"])


def mlp(writer: Writer, prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Tensor]]:
    for name, size in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        yield from writer.linear(f"{prefix}.{name}_proj", *size)


def qwen3_experts(writer: Writer, shape: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    hidden, count = shape["hidden_size"], shape["num_experts"]
    for name in ("q_norm", "k_norm"):
        yield f"{prefix}.self_attn.{name}.weight", torch.ones(shape["head_dim"], dtype=torch.bfloat16)
    yield f"{prefix}.mlp.gate.weight", writer.normal(count, hidden).bfloat16()
    for expert in range(count):
        yield from mlp(writer, f"{prefix}.mlp.experts.{expert}", hidden, shape["moe_intermediate_size"])


def latent_layer(writer: Writer, shape: dict[str, Any], at: int) -> Iterator[tuple[str, Tensor]]:
    """DeepSeek-V3's."""
    hidden, heads, prefix = shape["hidden_size"], shape["num_attention_heads"], f"model.layers.{at}"
    rank, q_rank, rope, nope = (
        shape[name] for name in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    )
    value = shape["v_head_dim"]
    attention = {
        "q_a_proj": (q_rank, hidden), "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (rank + rope, hidden), "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (hidden, heads * value),
    }  # fmt: skip
    for name, size in attention.items():
        yield from writer.linear(f"{prefix}.self_attn.{name}", *size)
    norms = {"self_attn.q_a_layernorm": q_rank, "self_attn.kv_a_layernorm": rank}
    for name, size in {**norms, "input_layernorm": hidden, "post_attention_layernorm": hidden}.items():
        yield f"{prefix}.{name}.weight", torch.ones(size, dtype=torch.bfloat16)
    if at < shape["first_k_dense_replace"]:
        yield from mlp(writer, f"{prefix}.mlp", hidden, shape["intermediate_size"])
        return
    inner, count = shape["moe_intermediate_size"], shape["n_routed_experts"]
    yield f"{prefix}.mlp.gate.weight", writer.normal(count, hidden).bfloat16()
    yield f"{prefix}.mlp.gate.e_score_correction_bias", torch.zeros(count)
    yield from mlp(writer, f"{prefix}.mlp.shared_experts", hidden, inner * shape["n_shared_experts"])
    for expert in range(count):
        yield from mlp(writer, f"{prefix}.mlp.experts.{expert}", hidden, inner)


def gpt_oss_experts(writer: Writer, shape: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    hidden, inner, count = shape["hidden_size"], shape["intermediate_size"], shape["num_local_experts"]
    yield f"{prefix}.self_attn.sinks", writer.normal(shape["num_attention_heads"]).bfloat16()
    yield f"{prefix}.mlp.router.weight", writer.normal(count, hidden).bfloat16()
    yield f"{prefix}.mlp.router.bias", writer.normal(count).bfloat16()
    yield from writer.packed(f"{prefix}.mlp.experts.gate_up_proj", count, 2 * inner, hidden)
    yield from writer.packed(f"{prefix}.mlp.experts.down_proj", count, hidden, inner)
    yield f"{prefix}.mlp.experts.gate_up_proj_bias", writer.normal(count, 2 * inner).bfloat16()
    yield f"{prefix}.mlp.experts.down_proj_bias", writer.normal(count, hidden).bfloat16()


def write_config(folder: Path, shape: dict[str, Any], *, quant: str) -> None:
    """What `load_format: dummy` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape, quant=quant), indent=1))
    if quant == "fp8":
        settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        described = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": settings}
        (folder / "hf_quant_config.json").write_text(json.dumps(described, indent=1))


def write(folder: Path, shape: dict[str, Any], *, quant: str, device: str) -> None:
    write_config(folder, shape, quant=quant)
    writer = Writer(folder, quant=quant, device=device)
    layers = shape["num_hidden_layers"]
    for at in range(layers):
        writer.save(f"model-{at:05d}.safetensors", dict(layer_tensors(writer, shape, at)))
    ends = {
        "model.embed_tokens.weight": writer.normal(shape["vocab_size"], shape["hidden_size"]).bfloat16(),
        "lm_head.weight": writer.normal(shape["vocab_size"], shape["hidden_size"]).bfloat16(),
        "model.norm.weight": torch.ones(shape["hidden_size"], dtype=torch.bfloat16),
    }
    writer.save(f"model-{layers:05d}.safetensors", ends)
    index = {"metadata": {"total_size": writer.total_bytes}, "weight_map": writer.index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--quant", choices=["fp8", "fp8_block", "mxfp4", "none"], help="the shape's usual one if left out"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    shape = dict(SHAPES[options.shape])
    if options.layers is not None:
        shape["num_hidden_layers"] = options.layers
    quants = QUANTS[shape.get("model_type", "llama")]
    if options.quant not in (None, *quants):
        parser.error(f"--quant: {options.shape} is written as {' or '.join(quants)}")
    write(options.folder, shape, quant=options.quant or quants[0], device=options.device)


if __name__ == "__main__":
    main()
