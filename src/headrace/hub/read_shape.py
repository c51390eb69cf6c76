"""A Hugging Face config to the numbers of its model: `ModelShape`.

Model types that share a structure share the code: what a config states by a key (a latent, experts, kinds of layers)
is read from the key, and `TRAITS` holds the rest by type. An unknown type is read by its keys alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.hub.config import stated_quantisation, text_config
from headrace.hub.errors import ModelError
from headrace.hub.keys import Keys
from headrace.hub.mixers import (
    Traits,
    attention_layer,
    delta_layer,
    kimi_delta_layer,
    latent_layer,
    mamba_layer,
    whole,
)
from headrace.hub.shape import LayerShape, ModelShape, Weight
from headrace.hub.storage import stored_as

MAX_LAYERS = 10_000

_QWEN_HYBRID = Traits(qk_norm="head", gated_query=True)
_GEMMA3 = Traits(qk_norm="head", num_norms=4, is_tied=True, full_every=6)
TRAITS: Mapping[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(slides=True),
    "mixtral": Traits(slides=True),
    "phi3": Traits(slides=True),
    "qwen2": Traits(qkv_bias=True, out_bias=False),
    "qwen3": Traits(qk_norm="head"),
    "qwen3_moe": Traits(qk_norm="head"),
    "gemma2": Traits(num_norms=4, is_tied=True, full_every=2),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "deepseek_v3": Traits(),
    "deepseek_v32": Traits(),
    "kimi_k2": Traits(),
    "kimi_linear": Traits(),
    "glm_moe_dsa": Traits(),
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "minimax_m2": Traits(qk_norm="all"),
    "minimax_m3_vl_text": Traits(qk_norm="head"),
    "gpt_oss": Traits(head_logits=True, full_every=2, qkv_bias=True, out_bias=True),
    "nemotron_h": Traits(num_norms=1),
}

_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
    "gemma3": _GEMMA3_DEFAULTS,
    "gemma3_text": _GEMMA3_DEFAULTS,
    "kimi_linear": {"model_max_length": 1_048_576},
    "nemotron_h": {"mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 4096},
}
"""What transformers takes for keys that a config leaves out."""

FULL, SLIDING, INDEXED, LINEAR, EXPERTS, DENSE = "full", "sliding", "indexed", "linear", "experts", "dense"
KINDS = {
    "full_attention": FULL, "sliding_attention": SLIDING, "chunked_attention": SLIDING, "indexed_attention": INDEXED,
    "minimax_m3_sparse": INDEXED, "linear_attention": LINEAR, "mamba": LINEAR, "attention": FULL, "moe": EXPERTS,
    "mlp": DENSE,
}  # fmt: skip
PATTERN_KINDS = {"M": LINEAR, "*": FULL, "E": EXPERTS, "-": DENSE}


def read_shape(config: Mapping[str, Any], *, place: str = "config.json") -> ModelShape:
    """The shape of the language model of a config (as `hub.config.read_config` gives it).

    Raises:
        ModelError: a key that is missing or no such number, by name.
    """
    text = dict(text_config(config))
    model_type = str(text.get("model_type") or config.get("model_type"))
    known = TRAITS.get(model_type)
    traits = known or Traits()
    keys = Keys({**DEFAULTS.get(model_type, {}), **text}, place)
    kinds = layer_kinds(keys, traits)
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        model_type=model_type,
        hidden_size=keys.size("hidden_size"),
        vocab_size=keys.size("vocab_size"),
        max_position=keys.size("max_position_embeddings", "model_max_length", "max_seq_len", "n_positions"),
        layers=tuple(_layer(keys, traits, index, kind) for index, kind in enumerate(kinds)),
        dtype=_dtype(text, config),
        state_dtype=str(keys.find("mamba_ssm_cache_dtype", "mamba_ssm_dtype") or ""),
        is_tied=traits.is_tied if is_tied is None else bool(is_tied),
        intermediate_size=_widest(keys),
        storage=stored_as(stated_quantisation(config), place),
        is_known=known is not None,
    )


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    stated = next((part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key)), None)
    return str(stated or "bfloat16").removeprefix("torch.")


def layer_kinds(keys: Keys, traits: Traits) -> list[str]:
    """By layer: one of FULL, SLIDING, INDEXED, LINEAR, or of a layer without attention EXPERTS or DENSE."""
    listed = keys.words("layers_block_type", "layer_types")
    pattern = keys.find("hybrid_override_pattern")
    if listed is not None:
        kinds = [KINDS.get(kind, FULL) for kind in listed]
        return [INDEXED if kind == FULL and _is_indexed_everywhere(keys) else kind for kind in kinds]
    if isinstance(pattern, str):
        return [PATTERN_KINDS.get(letter, FULL) for letter in pattern]
    count = keys.size("num_hidden_layers")
    if count > MAX_LAYERS:
        raise ModelError(f"{keys.place}: num_hidden_layers must be at most {MAX_LAYERS}, not {count}")
    if "linear_attn_config" in keys:
        full: list[int] = keys.section("linear_attn_config").find("full_attn_layers") or []
        return [FULL if layer + 1 in full else LINEAR for layer in range(count)]
    if "linear_num_value_heads" in keys:
        every = keys.size("full_attention_interval", default=4)
        return [LINEAR if (layer + 1) % every else FULL for layer in range(count)]
    sparse = keys.section("sparse_attention_config").find("sparse_attention_freq")
    if isinstance(sparse, list):
        return [INDEXED if flag else FULL for flag in sparse]  # pyright: ignore[reportUnknownVariableType]
    if _is_indexed_everywhere(keys):
        return [INDEXED] * count
    every = keys.number("sliding_window_pattern", default=traits.full_every)
    if every and "sliding_window" in keys:
        return [SLIDING if (layer + 1) % every else FULL for layer in range(count)]
    if keys.flag("use_sliding_window", traits.slides) and "sliding_window" in keys:
        first = 0 if traits.slides else keys.number("max_window_layers", default=0)
        return [SLIDING if layer >= first else FULL for layer in range(count)]
    return [FULL] * count


def _is_indexed_everywhere(keys: Keys) -> bool:
    """DeepSeek Sparse Attention."""
    return "kv_lora_rank" in keys and "index_topk" in keys


def _layer(keys: Keys, traits: Traits, index: int, kind: str) -> LayerShape:
    hidden = keys.size("hidden_size")
    norms = whole(traits.num_norms * hidden)
    if kind == LINEAR:
        mixed = _recurrent(keys)
    elif kind in (EXPERTS, DENSE):
        mixed = LayerShape(None, ())
    elif "kv_lora_rank" in keys:
        mixed = latent_layer(keys, is_indexed=kind == INDEXED and _runs_indexer(keys, index))
    else:
        window = keys.size("sliding_window", "attention_chunk_size") if kind == SLIDING else None
        mixed = attention_layer(keys, traits, window=window, is_indexed=kind == INDEXED)
    if traits.num_norms == 1 and mixed.mixer is not None:  # layers of one part each
        return LayerShape(mixed.mixer, (norms, *mixed.weights))
    mlp = _experts(keys, traits) if _has_experts(keys, index, kind) else _dense(keys)
    return LayerShape(mixed.mixer, (norms, *mixed.weights, *mlp))


def _runs_indexer(keys: Keys, index: int) -> bool:
    """Layers may share the choice of the one before."""
    listed = keys.words("indexer_types")
    if listed is not None:
        return index < len(listed) and listed[index] != "shared"
    pattern = keys.find("index_topk_pattern")
    if isinstance(pattern, str):
        return index < len(pattern) and pattern[index] == "F"
    every = keys.size("index_topk_freq", default=1)
    first = keys.number("index_skip_topk_offset", default=2)
    return every == 1 or index < first or (index - first + 1) % every == 0


def _recurrent(keys: Keys) -> LayerShape:
    if "mamba_num_heads" in keys:
        return mamba_layer(keys)
    return delta_layer(keys) if "linear_num_value_heads" in keys else kimi_delta_layer(keys)


# ---- MLPs ------------------------------------------------------------------------------------


def _num_experts(keys: Keys) -> int:
    return keys.number("n_routed_experts", "num_local_experts", "num_experts", default=0)


def _has_experts(keys: Keys, index: int, kind: str) -> bool:
    if kind in (EXPERTS, DENSE) or not _num_experts(keys):
        return kind == EXPERTS
    listed = keys.words("mlp_layer_types")
    if listed is not None:
        return index < len(listed) and listed[index] == "sparse"
    flags = keys.find("moe_layer_freq")
    if isinstance(flags, list):
        return index < len(flags) and bool(flags[index])  # pyright: ignore[reportUnknownArgumentType]
    listed = keys.find("mlp_only_layers")
    if isinstance(listed, list) and index in listed:
        return False
    dense = keys.number("first_k_dense_replace", default=0)
    return index >= dense and (index + 1) % keys.size("decoder_sparse_step", "moe_layer_freq", default=1) == 0


def _dense_width(keys: Keys) -> int:
    return keys.size("dense_intermediate_size", "intermediate_size")


def _expert_width(keys: Keys) -> int:
    return keys.size("moe_intermediate_size", "intermediate_size")


def _shared_width(keys: Keys) -> int:
    stated = ("shared_expert_intermediate_size", "shared_intermediate_size")
    if any(name in keys for name in stated):
        return keys.number(*stated)
    count = keys.number("n_shared_experts", "num_shared_experts", default=0)
    each = keys.size("moe_shared_expert_intermediate_size", default=_expert_width(keys)) if count else 0
    return count * each


def _widest(keys: Keys) -> int:
    """Features of the MLP that a token runs through: of experts, all that it is sent to."""
    widths = [keys.number("dense_intermediate_size", "intermediate_size", default=0)]
    if _num_experts(keys):
        chosen = keys.size("num_experts_per_tok", "num_experts_per_token", default=1)
        widths.append(chosen * _expert_width(keys) + _shared_width(keys))
    return max(widths)


def _mlp_matrices(keys: Keys) -> int:
    return 2 if str(keys.find("mlp_hidden_act")).startswith("relu2") else 3


def _dense(keys: Keys) -> tuple[Weight, ...]:
    hidden, width = keys.size("hidden_size"), _dense_width(keys)
    matrices = _mlp_matrices(keys)
    weights = [Weight(matrices * hidden * width, "dense", width)]
    if keys.flag("mlp_bias"):
        weights += [Weight((matrices - 1) * width, "dense", width, "plain"), whole(hidden)]
    return tuple(weights)


def _experts(keys: Keys, traits: Traits) -> tuple[Weight, ...]:
    hidden, width, count = keys.size("hidden_size"), _expert_width(keys), _num_experts(keys)
    latent = keys.number("moe_latent_size", default=0)
    matrices = _mlp_matrices(keys)
    weights = [
        Weight(count * matrices * (latent or hidden) * width, "experts", count, "expert", features=width),
        whole(count * hidden),
    ]
    if latent:
        weights.append(Weight(2 * hidden * latent))
    if traits.head_logits:  # gpt-oss: biases of the router and of every expert
        weights += [whole(count), Weight(count * (2 * width + hidden), "experts", count, "plain")]
    elif "n_group" in keys or "num_expert_group" in keys or "minimax" in str(keys.find("model_type")):
        weights.append(Weight(count, form="float32"))  # a correction of each expert's score
    shared = _shared_width(keys)
    if shared:
        weights.append(Weight(matrices * hidden * shared, "dense", shared))
        if "shared_expert_intermediate_size" in keys:
            weights.append(whole(hidden))
    return tuple(weights)
