"""GGUF metadata as a Hugging Face config dict.

Keys: the GGUF specification's `{architecture}.*`. What the file leaves to the reading program (gemma3's pattern of
layers, its local rope base and query scale; llama3's rope parameters, given as factors by frequency) is filled in
from the architecture's published configs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.hub.errors import ModelError

__all__ = ["ARCHITECTURES", "MODEL_TYPES", "hugging_face_config"]

ReadVector = Callable[[str], NDArray[np.float32]]
"""Reads a small float tensor of the file by its GGUF name."""

_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
ARCHITECTURES = tuple(_MODEL_TYPES)
MODEL_TYPES = frozenset(model_type for model_type, _ in _MODEL_TYPES.values())

_GEMMA3_PATTERN = 6
"""Every sixth layer attends to everything, the five before it to a window."""
_GEMMA3_27B_LAYERS = 62
"""The one size that scales queries by hidden size / heads instead of the head size."""
_LLAMA3_ORIGINAL_LENGTH = 8192
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hugging_face_config(
    metadata: Mapping[str, Any],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    qtypes: Set[str],
    read_vector: ReadVector,
) -> dict[str, Any]:
    """The config of a file with this metadata. `shapes` and `read_vector` go by the file's tensor names.

    Raises:
        ModelError: without a path: an architecture that is not read, a missing key, a variant that is not supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ModelError(
            f"GGUF architecture {architecture!r} is not supported (supported: {', '.join(ARCHITECTURES)});"
            " use the model's Hugging Face folder if its type is supported there"
        )
    keys = _Keys(metadata, architecture)
    _refuse_variants(keys, shapes)
    config = _common(keys, shapes, qtypes)
    if architecture == "gemma3":
        config |= _gemma3(keys, config)
    else:
        config |= _llama_like(architecture, shapes)
    scaling = _rope_scaling(keys, config, shapes, read_vector)
    config["rope_scaling"] = scaling
    return config


class _Keys:
    """Metadata of one architecture, by the part of the key after its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def get(self, name: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}")

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"GGUF metadata lacks {self.architecture}.{name}: convert the model again")
        return value

    def uniform(self, name: str) -> int:
        """A number that a file may also give by layer, in which case all layers must agree."""
        value = self.need(name)
        if isinstance(value, list):
            if len(set(value)) != 1:  # pyright: ignore[reportUnknownArgumentType]
                raise ModelError(
                    f"GGUF metadata {self.architecture}.{name} differs by layer, which is not supported:"
                    " use another model"
                )
            return int(value[0])  # pyright: ignore[reportUnknownArgumentType]
        return int(value)


def _refuse_variants(keys: _Keys, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if keys.get("expert_count"):
        raise ModelError(
            f"GGUF file of a {keys.architecture} model with experts is not supported: use its Hugging Face folder"
        )
    if (keys.metadata.get("split.count") or 1) > 1:
        raise ModelError("GGUF file is one part of several: merge the parts into one file first (gguf-split --merge)")
    if "token_embd.weight" not in shapes:
        raise ModelError("GGUF file has no token_embd.weight, so it isn't a whole language model: use another file")


def _common(keys: _Keys, shapes: Mapping[str, tuple[int, ...]], qtypes: Set[str]) -> dict[str, Any]:
    model_type, class_name = _MODEL_TYPES[keys.architecture]
    hidden_size = keys.need("embedding_length")
    num_heads = keys.uniform("attention.head_count")
    num_kv_heads = num_heads if keys.get("attention.head_count_kv") is None else keys.uniform("attention.head_count_kv")
    head_dim = keys.get("attention.key_length") or hidden_size // num_heads
    if keys.get("attention.value_length") not in (None, head_dim):
        raise ModelError(
            "GGUF file has other head sizes for keys and values, which is not supported: use another model"
        )
    if keys.get("rope.dimension_count") not in (None, head_dim):
        raise ModelError("GGUF file rotates a part of each head only, which is not supported: use another model")
    token = {name: keys.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": keys.uniform("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get("rope.freq_base") or 10000.0,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": _dtype(qtypes),
        "bos_token_id": token["bos"],
        "eos_token_id": token["eos"],
        "pad_token_id": token["padding"],
    }


def _dtype(qtypes: Set[str]) -> str:
    """The float type that the file's weights come from; a quantised file doesn't tell, and bfloat16 is usual."""
    if not qtypes <= set(_FLOAT_TYPES):
        return "bfloat16"
    return next((_FLOAT_TYPES[qtype] for qtype in ("BF16", "F16") if qtype in qtypes), "float32")


def _llama_like(architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    config: dict[str, Any] = {"hidden_act": "silu"}
    if architecture == "qwen2":
        config["use_sliding_window"] = False
    else:
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    if architecture == "qwen3":
        config["use_sliding_window"] = False
    return config


def _gemma3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, num_heads, head_dim = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    query_scalar = config["hidden_size"] // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim
    full = "full_attention"
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": query_scalar,
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": [
            full if (layer + 1) % _GEMMA3_PATTERN == 0 else "sliding_attention" for layer in range(num_layers)
        ],
        "rope_local_base_freq": keys.get("rope.freq_base_swa") or 10000.0,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _rope_scaling(
    keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read_vector: ReadVector
) -> dict[str, Any] | None:
    if "rope_freqs.weight" in shapes:
        return _llama3_scaling(read_vector("rope_freqs.weight"), config)
    if "rope_factors_long.weight" in shapes:
        return {
            "rope_type": "longrope",
            "long_factor": read_vector("rope_factors_long.weight").tolist(),
            "short_factor": read_vector("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
            "attention_factor": keys.get("rope.scaling.attn_factor"),
        }
    kind = keys.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    factor = keys.get("rope.scaling.factor") or 1.0
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        original = keys.get("rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        if keys.get("rope.scaling.attn_factor") is not None:
            # The file's factor multiplies YaRN's own; Hugging Face's replaces it.
            scaling["attention_factor"] = keys.get("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
        return scaling
    raise ModelError(f"GGUF metadata rope.scaling.type is {kind!r}, which is not supported: use another model")


def _llama3_scaling(factors: NDArray[np.float32], config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3.1's rope as parameters. The file holds what each frequency is divided by: [head_dim / 2]."""
    factor = float(factors.max())
    expected = _llama3_factors(factor, config["rope_theta"], config["head_dim"])
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError("GGUF file has rope frequency factors that are not Llama 3's: use its Hugging Face folder")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": _LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_LENGTH,
    }


def _llama3_factors(factor: float, theta: float, head_dim: int) -> NDArray[np.float64]:
    """[head_dim / 2]: 1 for short wavelengths, `factor` for long ones, a blend between (Llama 3.1's rope)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_LLAMA3_ORIGINAL_LENGTH / wavelengths - _LLAMA3_LOW_FREQ_FACTOR) / (
        _LLAMA3_HIGH_FREQ_FACTOR - _LLAMA3_LOW_FREQ_FACTOR
    )
    blend = np.minimum(np.maximum(smooth, 0.0), 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)
