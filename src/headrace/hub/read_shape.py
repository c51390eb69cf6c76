"""A Hugging Face config to the numbers of its model: `ModelShape`.

Model types that share a structure share the code: what a config states by a key (a latent, experts, kinds of layers)
is read from the key, and `TRAITS` holds the rest by type. An unknown type is read by its keys alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.hub.architectures import DEFAULTS, OWN_NAMES, STATED_POSITIONS, TRAITS, UNREAD
from headrace.hub.config import stated_quantisation, text_config
from headrace.hub.gemma import beside_experts, is_shared, layer_input_weights, shared_source
from headrace.hub.keys import Keys
from headrace.hub.kinds import DENSE, EXPERTS, FULL, HALVES, INDEXED, LINEAR, SLIDING, layer_kinds
from headrace.hub.mixers import (
    Traits,
    attention_layer,
    delta_layer,
    is_mamba,
    kimi_delta_layer,
    latent_layer,
    latent_width,
    mamba_layer,
    recurrent_width,
    whole,
)
from headrace.hub.parted import (
    compressed_layer,
    depth_weights,
    depth_width,
    is_compressed,
    is_hashed,
    pooled_latent_layer,
    stream_head,
    stream_weights,
    stream_width,
)
from headrace.hub.positions import max_position
from headrace.hub.shape import LayerShape, ModelShape, Weight
from headrace.hub.storage import stored_as


def read_shape(config: Mapping[str, Any], *, place: str = "config.json") -> ModelShape:
    """The shape of the language model of a config (as `hub.config.read_config` gives it).

    Raises:
        ModelError: a key that is missing or no such number, by name.
    """
    text = dict(text_config(config))
    model_type = _model_type(config)
    keys, traits = _rules(config, place)
    kinds = layer_kinds(keys, traits)
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        model_type=model_type,
        hidden_size=keys.size("hidden_size"),
        vocab_size=keys.size("vocab_size"),
        max_position=max_position(keys, is_stated=model_type in STATED_POSITIONS),
        layers=tuple(
            replace(_layer(keys, traits, index, kind), source=_source(keys, traits, kinds, index))
            for index, kind in enumerate(kinds)
        ),
        dtype=_dtype(text, config),
        state_dtype=str(keys.find("mamba_ssm_cache_dtype", "mamba_ssm_dtype") or ""),
        is_tied=traits.is_tied if is_tied is None else bool(is_tied),
        intermediate_size=_widest(keys),
        norm_size=keys.size("hidden_size") * (2 if traits.norm_bias else 1),
        storage=stored_as(stated_quantisation(config), place),
        is_known=model_type in TRAITS,
        parts_per_layer=_parts_per_layer(traits),
    )


def _model_type(config: Mapping[str, Any]) -> str:
    if config.get("model_type") in OWN_NAMES:
        return str(config["model_type"])
    return str(text_config(config).get("model_type") or config.get("model_type"))


def _rules(config: Mapping[str, Any], place: str) -> tuple[Keys, Traits]:
    model_type = _model_type(config)
    unread = UNREAD.get(model_type, ())
    stated = {key: value for key, value in text_config(config).items() if key not in unread}
    keys = Keys({**DEFAULTS.get(model_type, {}), **stated}, place)
    return keys, TRAITS.get(model_type) or Traits()


def _parts_per_layer(traits: Traits) -> int:
    return 2 if traits.parts == HALVES else 1


def mlp_width(config: Mapping[str, Any], *, place: str = "config.json") -> int:
    """`ModelShape.intermediate_size` alone, also of a config whose structure is not known; 0 where it states none."""
    return _widest(_rules(config, place)[0])


def num_layers(config: Mapping[str, Any], *, place: str = "config.json") -> int:
    """Layers as a checkpoint numbers them, also of a config whose structure is not known.

    Raises:
        ModelError: it doesn't say.
    """
    keys, traits = _rules(config, place)
    return len(layer_kinds(keys, traits)) // _parts_per_layer(traits)


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    stated = next((part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key)), None)
    return str(stated or "bfloat16").removeprefix("torch.")


def _layer(keys: Keys, traits: Traits, index: int, kind: str) -> LayerShape:
    hidden = keys.size("hidden_size")
    norms = whole(traits.num_norms * hidden * (2 if traits.norm_bias else 1) + traits.layer_factor)
    if is_compressed(keys):
        mixed = compressed_layer(keys, kind)
    elif kind == LINEAR:
        mixed = _recurrent(keys)
    elif kind in (EXPERTS, DENSE):
        mixed = LayerShape(None, ())
    elif "kv_lora_rank" in keys:
        of_kind = pooled_latent_layer if "index_kpool" in keys else latent_layer
        mixed = of_kind(keys, is_indexed=kind == INDEXED and _runs_indexer(keys, index))
    else:
        window = keys.size("sliding_window", "attention_chunk_size") if kind == SLIDING else None
        own = _layer_keys(keys, index, kind)
        has_values = not (kind == FULL and keys.flag("attention_k_eq_v"))
        mixed = attention_layer(
            own,
            traits,
            window=window,
            is_indexed=kind == INDEXED,
            has_values=has_values,
            is_shared=is_shared(keys, index),
        )
    if (traits.parts == "mixer | MLP" and mixed.mixer is not None) or (traits.parts == HALVES and kind == LINEAR):
        return LayerShape(mixed.mixer, (norms, *mixed.weights))
    streams = stream_weights(keys)
    if is_compressed(keys):
        mlp = _hashed(keys, traits) if is_hashed(keys, index) else _experts(keys, traits)
        streams += (stream_head(keys),) if index == keys.size("num_hidden_layers") - 1 else ()
    else:
        mlp = _experts(keys, traits) if _has_experts(keys, index, kind) else _dense(keys, traits, index)
    if keys.flag("enable_moe_block"):
        mlp = (*_dense(keys, traits, index), *mlp, beside_experts(keys, _num_experts(keys)))
    mixes = depth_weights(keys, index)
    return LayerShape(mixed.mixer, (norms, *mixed.weights, *mlp, *streams, *mixes, *layer_input_weights(keys, index)))


def _layer_keys(keys: Keys, index: int, kind: str) -> Keys:
    """Gemma 4: full layers have heads of sizes of their own."""
    if "per_layer_config" in keys:
        own = keys.section("per_layer_config").section(str(index)).values
    elif kind == FULL and "global_head_dim" in keys:
        own = {"head_dim": keys.size("global_head_dim")}
        if keys.flag("attention_k_eq_v") and "num_global_key_value_heads" in keys:
            own["num_key_value_heads"] = keys.size("num_global_key_value_heads")
    else:
        return keys
    return Keys({**keys.values, **own}, keys.place)


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


def _source(keys: Keys, traits: Traits, kinds: Sequence[str], index: int) -> int | None:
    """As of `LayerShape`."""
    if traits.parts == HALVES:
        return index - 1 if kinds[index] == FULL else None
    if "kv_lora_rank" in keys and kinds[index] == INDEXED and not _runs_indexer(keys, index):
        choosing = (at for at in range(index) if kinds[at] == INDEXED and _runs_indexer(keys, at))
        return max(choosing, default=None)
    return shared_source(keys, kinds, index)


def _recurrent(keys: Keys) -> LayerShape:
    if is_mamba(keys):
        return mamba_layer(keys)
    return delta_layer(keys) if "linear_num_value_heads" in keys else kimi_delta_layer(keys)


# ---- MLPs ------------------------------------------------------------------------------------


def _num_experts(keys: Keys) -> int:
    if "enable_moe_block" in keys.values and not keys.flag("enable_moe_block"):
        return 0
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
    listed = keys.find("moe_layers")
    if isinstance(listed, list):
        return index in listed
    listed = keys.find("mlp_only_layers")
    if isinstance(listed, list) and index in listed:
        return False
    dense = keys.number("first_k_dense_replace", default=0)
    return index >= dense and (index + 1) % _sparse_step(keys) == 0


def _sparse_step(keys: Keys) -> int:
    return keys.size("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1)


def _dense_width(keys: Keys) -> int:
    return keys.size(
        "dense_intermediate_size", "intermediate_size_mlp", "shared_intermediate_size", "intermediate_size"
    )


def _expert_width(keys: Keys) -> int:
    return keys.size("moe_intermediate_size", "intermediate_size")


def _shared_width(keys: Keys) -> int:
    stated = ("shared_expert_intermediate_size", "shared_intermediate_size")
    if any(name in keys for name in stated):
        return keys.number(*stated)
    count = keys.number("n_shared_experts", "num_shared_experts", default=int("intermediate_size_mlp" in keys))
    each = keys.size("moe_shared_expert_intermediate_size", default=_expert_width(keys)) if count else 0
    return count * each


def _widest(keys: Keys) -> int:
    """Features of the MLP that a token runs through: of experts, all that it is sent to, and half of their results.
    A recurrent layer counts as the MLP that takes as much, and so does latent attention."""
    widths = [keys.number("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", default=0)]
    if keys.flag("use_double_wide_mlp"):
        widths[0] *= 2
    if _num_experts(keys):
        chosen = keys.size("num_experts_per_tok", "num_experts_per_token", "top_k_experts", default=1)
        results = keys.number("hidden_size", default=0) // 2
        widths.append(chosen * (_expert_width(keys) + results) + _shared_width(keys))
    return max(*widths, recurrent_width(keys), latent_width(keys)) + stream_width(keys) + depth_width(keys)


def _mlp_matrices(keys: Keys) -> int:
    return 2 if str(keys.find("mlp_hidden_act")).startswith("relu2") else 3


def _dense(keys: Keys, traits: Traits, index: int) -> tuple[Weight, ...]:
    hidden, width = keys.size("hidden_size"), _dense_width(keys)
    if keys.flag("use_double_wide_mlp") and is_shared(keys, index):
        width *= 2
    matrices = _mlp_matrices(keys) if traits.gated_mlp else 2
    weights = [Weight(matrices * hidden * width, "dense", width)]
    if keys.flag("mlp_bias"):
        weights += [Weight((matrices - 1) * width, "dense", width, "plain"), whole(hidden)]
    return tuple(weights)


def _hashed(keys: Keys, traits: Traits) -> tuple[Weight, ...]:
    """Experts without a correction, and the table that chooses them, of 64-bit integers."""
    table = Weight(2 * keys.size("vocab_size") * keys.size("num_experts_per_tok"), form="float32")
    return (*_experts(keys, replace(traits, router="float32")), table)


def _experts(keys: Keys, traits: Traits) -> tuple[Weight, ...]:
    hidden, width, count = keys.size("hidden_size"), _expert_width(keys), _num_experts(keys)
    latent = keys.number("moe_latent_size", "routed_expert_hidden_size", default=0)
    matrices = _mlp_matrices(keys)
    is_wide = traits.router in ("wide", "float32") or "kv_lora_rank" in keys
    weights = [
        Weight(count * matrices * (latent or hidden) * width, "experts", count, "expert", features=width),
        Weight(count * hidden, form="float32") if is_wide else whole(count * hidden),
    ]
    if latent and keys.flag("latent_moe_use_norm"):  # ranks share the way back
        weights += [Weight(hidden * latent), whole(latent), Weight(hidden * latent, "dense", latent)]
    elif latent:
        weights.append(Weight(2 * hidden * latent))
    if traits.head_logits:  # gpt-oss: biases of the router and of every expert
        weights += [whole(count), Weight(count * 2 * width, "experts", count, "plain", features=width)]
        weights.append(Weight(count * hidden, "experts", count, "plain"))
    elif traits.router != "float32" and (traits.router or "n_group" in keys or "num_expert_group" in keys):
        weights.append(Weight(count, form="float32"))  # a correction of each expert's score
    shared = _shared_width(keys)
    if shared:
        weights.append(Weight(matrices * hidden * shared, "dense", shared))
        if "shared_expert_intermediate_size" in keys:
            weights.append(whole(hidden))
    return tuple(weights)
