"""Write a random checkpoint of a known shape, in the layout that quantised checkpoints have on the hub.

    python benchmarks/random_checkpoint.py llama-3.1-8b FOLDER [--quant fp8|none] [--layers N] [--device cuda]

Weights are N(0, 0.02), never zeros: products of zeros draw less power and run faster than real ones. FP8 is ModelOpt's
layout: `weight` in float8_e4m3fn, `weight_scale` and `input_scale` as float32 scalars, `k_scale` and `v_scale` beside
the projections, hf_quant_config.json. There is no tokenizer: measure with ids (`--skip_tokenizer_init`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FP8_MAX = 448.0
INPUT_MAX = 8.0
"""Activations of a network with such weights stay below this; static scales are made for it."""

SHAPES = {
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
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


def config_of(shape: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
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
        if self.quant == "none":
            yield f"{name}.weight", weight.bfloat16()
            return
        scale = weight.abs().max() / FP8_MAX
        yield f"{name}.weight", (weight / scale).to(torch.float8_e4m3fn)
        yield f"{name}.weight_scale", scale
        yield f"{name}.input_scale", torch.tensor(INPUT_MAX / FP8_MAX)

    def save(self, file: str, tensors: dict[str, Tensor]) -> None:
        host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(host, self.folder / file)
        self.index.update(dict.fromkeys(host, file))
        self.total_bytes += sum(tensor.nbytes for tensor in host.values())


def layer_tensors(writer: Writer, shape: dict[str, int], at: int) -> Iterator[tuple[str, Tensor]]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    kv = shape["num_key_value_heads"] * head
    prefix = f"model.layers.{at}"
    for name, out_features, in_features in (
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", kv, hidden),
        ("self_attn.v_proj", kv, hidden),
        ("self_attn.o_proj", hidden, hidden),
        ("mlp.gate_proj", inner, hidden),
        ("mlp.up_proj", inner, hidden),
        ("mlp.down_proj", hidden, inner),
    ):
        yield from writer.linear(f"{prefix}.{name}", out_features, in_features)
    if writer.quant == "fp8":
        yield f"{prefix}.self_attn.k_proj.k_scale", torch.tensor(INPUT_MAX / FP8_MAX)
        yield f"{prefix}.self_attn.v_proj.v_scale", torch.tensor(INPUT_MAX / FP8_MAX)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)


def write(folder: Path, shape: dict[str, int], *, quant: str, device: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1))
    if quant == "fp8":
        settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        described = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": settings}
        (folder / "hf_quant_config.json").write_text(json.dumps(described, indent=1))
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
    parser.add_argument("--quant", choices=["fp8", "none"], default="fp8")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    shape = dict(SHAPES[options.shape])
    if options.layers is not None:
        shape["num_hidden_layers"] = options.layers
    write(options.folder, shape, quant=options.quant, device=options.device)


if __name__ == "__main__":
    main()
