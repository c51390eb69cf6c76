"""Attention and recurrent layers of a config, in numbers.

Formulas: GQA (Ainslie et al. 2023), MLA and its indexer (DeepSeek-AI 2024, 2025), Gated DeltaNet (Yang et al. 2025),
Kimi Delta Attention (Kimi Team 2025), Mamba 2 (Dao and Gu 2024); tensors as transformers names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.hub.errors import ModelError
from headrace.hub.keys import Keys
from headrace.hub.shape import AttentionShape, LatentShape, LayerShape, RecurrentShape, Weight

INDEX_SCALE_BYTES = 4
"""An indexer keeps its key in 8 bits a feature, and a scale."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model type does that its config doesn't say."""

    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    out_bias: bool | None = None
    qk_norm: Literal["", "head", "all"] = ""
    """A norm over each head's features, or over those of all heads."""
    gated_query: bool = False
    """The query projection yields a gate as well."""
    head_logits: bool = False
    """A learned logit per head takes part in the softmax."""
    num_norms: int = 2
    is_tied: bool = False
    full_every: int = 0
    """Every so many layers one attends to everything, where the config lists no kinds."""
    slides: bool = False
    """A stated `sliding_window` holds for all layers."""


def whole(count: int) -> Weight:
    """A small weight, such as a norm, that every rank holds and nothing quantises."""
    return Weight(count, form="plain")


def attention_layer(keys: Keys, traits: Traits, *, window: int | None, is_indexed: bool) -> LayerShape:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    dim = keys.size("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{keys.place}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    said = keys.flag("attention_bias")
    qkv_bias = said if traits.qkv_bias is None else traits.qkv_bias
    out_bias = said if traits.out_bias is None else traits.out_bias
    q_width = heads * dim * (2 if traits.gated_query else 1)

    def of_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "heads", heads, "plain" if plain else "linear", kv_heads=kv_heads)

    def of_kv_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "kv_heads", kv_heads, "plain" if plain else "linear")

    weights = [of_heads(hidden * (q_width + heads * dim)), of_kv_heads(2 * hidden * kv_heads * dim)]
    if qkv_bias:
        weights += [of_heads(q_width, plain=True), of_kv_heads(2 * kv_heads * dim, plain=True)]
    if out_bias:
        weights.append(whole(hidden))
    if traits.qk_norm == "head":
        weights.append(whole(2 * dim))
    elif traits.qk_norm == "all":
        weights += [of_heads(heads * dim, plain=True), of_kv_heads(kv_heads * dim, plain=True)]
    if traits.head_logits:
        weights.append(of_heads(heads, plain=True))
    index_bytes = 0
    if is_indexed:
        index_heads, index_dim = keys.size("index_n_heads", default=4), keys.size("index_head_dim", default=128)
        weights += [Weight(hidden * (index_heads + 1) * index_dim), whole(2 * index_dim)]
        index_bytes = index_dim + INDEX_SCALE_BYTES
    return LayerShape(AttentionShape(heads, kv_heads, dim, window, index_bytes), tuple(weights))


def latent_layer(keys: Keys, *, is_indexed: bool) -> LayerShape:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    latent, rope = keys.size("kv_lora_rank"), keys.size("qk_rope_head_dim")
    nope, value = keys.size("qk_nope_head_dim"), keys.size("v_head_dim")
    query = keys.find("q_lora_rank")

    def of_heads(count: int) -> Weight:
        return Weight(count, "heads", heads, kv_heads=heads)

    weights = [Weight(hidden * (latent + rope)), whole(latent), of_heads(latent * heads * (nope + value))]
    weights.append(of_heads(hidden * heads * value))
    if query is None:
        weights.append(of_heads(hidden * heads * (nope + rope)))
    else:
        query = keys.size("q_lora_rank")
        weights += [Weight(hidden * query), whole(query), of_heads(query * heads * (nope + rope))]
    if keys.flag("attention_bias"):
        weights.append(whole(latent + rope + hidden + (query or 0)))
    index_bytes = 0
    if is_indexed:
        index_heads, index_dim = keys.size("index_n_heads"), keys.size("index_head_dim")
        weights += [
            Weight((query or hidden) * index_heads * index_dim + hidden * index_dim),
            whole(2 * index_dim + hidden * index_heads),
        ]
        index_bytes = index_dim + INDEX_SCALE_BYTES
    return LayerShape(LatentShape(heads, latent, rope, index_bytes), tuple(weights))


def delta_layer(keys: Keys) -> LayerShape:
    """Gated DeltaNet."""
    hidden = keys.size("hidden_size")
    k_heads, v_heads = keys.size("linear_num_key_heads"), keys.size("linear_num_value_heads")
    k_dim, v_dim = keys.size("linear_key_head_dim"), keys.size("linear_value_head_dim")
    kernel = keys.size("linear_conv_kernel_dim", default=4)
    conv_width = 2 * k_heads * k_dim + v_heads * v_dim

    def of_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "heads", v_heads, "plain" if plain else "linear", kv_heads=k_heads)

    weights = (
        of_heads(hidden * (conv_width + v_heads * v_dim)),
        of_heads(hidden * 2 * v_heads, plain=True),
        of_heads(hidden * v_heads * v_dim),
        of_heads(conv_width * kernel, plain=True),
        of_heads(2 * v_heads, plain=True),
        whole(v_dim),
    )
    return LayerShape(RecurrentShape(v_heads, v_heads * k_dim * v_dim, conv_width * (kernel - 1), "GDN"), weights)


def kimi_delta_layer(keys: Keys) -> LayerShape:
    """Kimi Delta Attention. Checkpoints state it in `linear_attn_config`, transformers flat."""
    stated = keys.section("linear_attn_config")
    hidden = keys.size("hidden_size")
    heads = stated.size("num_heads", default=keys.size("linear_num_heads", default=32))
    dim = stated.size("head_dim", default=keys.size("linear_head_dim", default=128))
    kernel = stated.size("short_conv_kernel_size", default=keys.size("linear_conv_kernel_dim", default=4))
    width = heads * dim

    def of_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "heads", heads, "plain" if plain else "linear", kv_heads=heads)

    weights = (
        of_heads(4 * hidden * width),
        of_heads(3 * width * kernel, plain=True),
        Weight(2 * hidden * dim),
        of_heads(2 * dim * width),
        of_heads(hidden * heads, plain=True),
        of_heads(width + heads, plain=True),
        whole(dim),
    )
    return LayerShape(RecurrentShape(heads, heads * dim * dim, 3 * width * (kernel - 1), "KDA"), weights)


def mamba_layer(keys: Keys) -> LayerShape:
    """Mamba 2, as Nemotron-H has it."""
    hidden, heads = keys.size("hidden_size"), keys.size("mamba_num_heads")
    dim, state = keys.size("mamba_head_dim"), keys.size("ssm_state_size")
    groups, kernel = keys.size("n_groups", default=8), keys.size("conv_kernel", default=4)
    width = heads * dim
    conv_width = width + 2 * groups * state

    def of_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "heads", heads, "plain" if plain else "linear", kv_heads=groups)

    weights = [
        of_heads(hidden * (width + conv_width + heads)),
        of_heads(hidden * width),
        of_heads(conv_width * (kernel + (1 if keys.flag("use_conv_bias", True) else 0)), plain=True),
        of_heads(3 * heads, plain=True),
        of_heads(width, plain=True),
    ]
    if keys.flag("mamba_proj_bias") or keys.flag("use_bias"):
        weights += [of_heads(width + conv_width + heads, plain=True), whole(hidden)]
    return LayerShape(RecurrentShape(heads, heads * dim * state, conv_width * (kernel - 1), "Mamba 2"), tuple(weights))
