"""Writes tiny GGUF files for tests: every storage type, each architecture's tensors as the converter stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 40

FLOAT_TYPES = ("F32", "F16", "BF16")
LEGACY_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
STORAGE_TYPES = FLOAT_TYPES + LEGACY_TYPES + K_TYPES


def random_stored(rng: np.random.Generator, shape: tuple[int, ...], storage: str) -> np.ndarray:
    """Rows of a matrix as stored: random values in float types, random blocks (with sane scales) in the others."""
    qtype = GGMLQuantizationType[storage]
    values = rng.standard_normal(shape, dtype=np.float32)
    if storage not in K_TYPES:
        return gguf.quantize(values, qtype)
    block_size, block_bytes = GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, size=(shape[0] * shape[1] // block_size, block_bytes), dtype=np.uint8)
    # Half-float scales by type: where d (and dmin) lie in the block.
    for start in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[storage]:
        scales = rng.uniform(0.001, 0.01, size=len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def tensor_shapes(architecture: str, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """GGUF names and shapes of a tiny model."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
        "attn_k.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
        "ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (NUM_HEADS * HEAD_DIM,)}
        layer |= {f"attn_{kind}.bias": (NUM_KV_HEADS * HEAD_DIM,) for kind in "kv"}
    if architecture in ("qwen3", "gemma3"):
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if architecture == "gemma3":
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    for number in range(NUM_LAYERS):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def config_metadata(architecture: str) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": HIDDEN,
        "block_count": NUM_LAYERS,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "vocab_size": VOCAB,
    }
    if architecture == "llama":
        keys["rope.dimension_count"] = HEAD_DIM
    if architecture in ("qwen3", "gemma3"):
        keys |= {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    if architecture == "gemma3":
        keys["attention.sliding_window"] = 16
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]
) -> Path:
    """`tensors` by GGUF name: the array as stored, and its storage type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, (stored, storage) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[storage])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_tiny_model(
    path: Path,
    architecture: str,
    *,
    tied: bool = True,
    storage: Iterable[str] = ("F32",),
    extra: Mapping[str, Any] | None = None,
) -> dict[str, tuple[np.ndarray, str]]:
    """A whole model whose matrices take the storage types in turn; returns what was written."""
    rng = np.random.default_rng(7)
    types = list(storage)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    num_matrices = 0
    for name, shape in tensor_shapes(architecture, tied=tied).items():
        if len(shape) == 1:
            tensors[name] = (rng.standard_normal(shape, dtype=np.float32), "F32")
            continue
        kind = types[num_matrices % len(types)]
        num_matrices += 1
        tensors[name] = (random_stored(rng, shape, kind), kind)
    write_gguf(path, architecture, {**config_metadata(architecture), **(extra or {})}, tensors)
    return tensors
