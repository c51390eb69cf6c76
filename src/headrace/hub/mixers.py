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

WIDE_PARTS = 5
"""float32 values that a recurrent layer holds of each feature: query, key, value, gate, result."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers a stated `sliding_window` holds for. The first three: where the config lists no kinds."""

    full_every: int = 0
    """For all but every so many-th layer."""
    everywhere: bool = False
    early: bool = False
    """For every other one of the first `max_window_layers`, once `use_sliding_window` is set."""
    by_flag: bool = False
    """For none without `use_sliding_window`, whatever the config lists."""
    ends_full: bool = False
    """Not for the last layer, whatever the config lists."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model type does that its config doesn't say."""

    bias_key: str = "attention_bias"
    qkv_bias: bool | None = None
    """None: as `bias_key` says."""
    out_bias: bool | None = None
    qk_norm: Literal["", "head", "all"] = ""
    """A norm over each head's features, or over those of all heads."""
    gated_query: bool = False
    """The query projection yields a gate as well."""
    head_logits: bool = False
    """A learned logit per head takes part in the softmax."""
    num_norms: int = 2
    norm_bias: bool = False
    """Norms have one, the last too."""
    is_recurrent: bool = False
    """Every layer keeps a state where the config lists no kinds."""
    parts: Literal["mixer, MLP", "mixer | MLP", "state + heads, MLP"] = "mixer, MLP"
    """Of a layer: a mixer and an MLP, one of the two, or a state and attention side by side on one norm and an MLP,
    which is two layers here."""
    gated_mlp: bool = True
    layer_factor: bool = False
    """A number that the layer's result is multiplied with."""
    router: Literal["", "corrected", "wide", "float32"] = ""
    """With a correction of each expert's score (as those with groups have anyway); `wide` ones are in float32 as well,
    whatever the model is in, as are those beside latent attention. `float32` is that without a correction."""
    is_tied: bool = False
    windows: Windows = Windows()


def whole(count: int) -> Weight:
    """A small weight, such as a norm, that every rank holds and nothing quantises."""
    return Weight(count, form="plain")


def attention_layer(
    keys: Keys,
    traits: Traits,
    *,
    window: int | None,
    is_indexed: bool,
    has_values: bool = True,
    is_shared: bool = False,
) -> LayerShape:
    """
    Args:
        has_values: else the projection of keys makes the values too.
        is_shared: queries alone, for the keys and values of another layer.
    """
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    dim = keys.size("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{keys.place}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    kv_parts = 0 if is_shared else 2 if has_values else 1
    said = keys.flag(traits.bias_key)
    qkv_bias = said if traits.qkv_bias is None else traits.qkv_bias
    out_bias = keys.flag("attention_out_bias", said) if traits.out_bias is None else traits.out_bias
    q_width = heads * dim * (2 if traits.gated_query else 1)

    def of_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "heads", heads, "plain" if plain else "linear", kv_heads=kv_heads)

    def of_kv_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "kv_heads", kv_heads, "plain" if plain else "linear")

    weights = [of_heads(hidden * (q_width + heads * dim)), of_kv_heads(kv_parts * hidden * kv_heads * dim)]
    if qkv_bias:
        weights += [of_heads(q_width, plain=True), of_kv_heads(kv_parts * kv_heads * dim, plain=True)]
    if out_bias:
        weights.append(whole(hidden))
    qk_norm = traits.qk_norm if keys.flag("use_qk_norm", True) else ""
    if qk_norm == "head":
        weights.append(whole(dim if is_shared else 2 * dim))
    elif qk_norm == "all":
        weights += [of_heads(heads * dim, plain=True), of_kv_heads(kv_heads * dim, plain=True)]
    if traits.head_logits:
        weights.append(of_heads(heads, plain=True))
    index_dim = 0
    if is_indexed:
        index_heads, index_dim = keys.size("index_n_heads", default=4), keys.size("index_head_dim", default=128)
        weights += [of_kv_heads(hidden * index_heads * index_dim), Weight(hidden * index_dim), whole(2 * index_dim)]
    return LayerShape(AttentionShape(heads, kv_heads, dim, window, index_dim, is_shared), tuple(weights))


def latent_layer(keys: Keys, *, is_indexed: bool) -> LayerShape:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    latent, rope = keys.size("kv_lora_rank"), keys.number("qk_rope_head_dim")
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
    if keys.flag("mla_use_output_gate"):
        weights.append(of_heads(hidden * heads * value))
    if keys.flag("attention_bias"):
        weights.append(whole(latent + rope + hidden + (query or 0)))
    index_heads = index_dim = 0
    if is_indexed:
        index_heads, index_dim = keys.size("index_n_heads"), keys.size("index_head_dim")
        weights += [
            Weight((query or hidden) * index_heads * index_dim + hidden * index_dim),
            whole(2 * index_dim + hidden * index_heads),
        ]
    top = keys.size("index_topk") if "index_topk" in keys else None
    mixer = LatentShape(heads, latent, rope, nope, value, index_dim, index_heads=index_heads, top=top)
    return LayerShape(mixer, tuple(weights))


def latent_width(keys: Keys) -> int:
    """Half of what absorbed latent attention holds of a token: queries, latents asked for and found, the result; 0
    without such layers."""
    if "kv_lora_rank" not in keys:
        return 0
    query = keys.size("qk_nope_head_dim") + keys.number("qk_rope_head_dim")
    return keys.size("num_attention_heads") * (query + 2 * keys.size("kv_lora_rank") + keys.size("v_head_dim")) // 2


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
        Weight(2 * v_heads, "heads", v_heads, "float32", kv_heads=k_heads),
        whole(v_dim),
    )
    mixer = RecurrentShape(
        v_heads, v_heads * k_dim * v_dim, v_heads * v_dim * (kernel - 1), "GDN", num_groups=k_heads,
        group_conv_count=2 * k_heads * k_dim * (kernel - 1),
    )  # fmt: skip
    return LayerShape(mixer, weights)


def kimi_delta_layer(keys: Keys) -> LayerShape:
    """Kimi Delta Attention. Checkpoints state it in `linear_attn_config`, transformers flat."""
    stated = keys.section("linear_attn_config")
    hidden = keys.size("hidden_size")
    heads = stated.size("num_heads", default=keys.size("linear_num_heads", default=32))
    dim = stated.size("head_dim", default=keys.size("linear_head_dim", default=128))
    kernel = stated.size("short_conv_kernel_size", default=keys.size("linear_conv_kernel_dim", default=4))
    width, is_full = heads * dim, stated.flag("use_full_rank_gate")
    down = dim * (1 if is_full else 2)

    def of_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "heads", heads, "plain" if plain else "linear", kv_heads=heads)

    weights = (
        of_heads((5 if is_full else 4) * hidden * width),
        of_heads(3 * width * kernel, plain=True),
        Weight(hidden * down),
        of_heads(down * width),
        of_heads(hidden * heads, plain=True),
        Weight(width + heads, "heads", heads, "float32", kv_heads=heads),
        whole(dim),
    )
    mixer = RecurrentShape(heads, heads * dim * dim, 3 * width * (kernel - 1), "KDA", num_groups=heads)
    return LayerShape(mixer, weights)


def is_mamba(keys: Keys) -> bool:
    return any(name in keys for name in ("ssm_state_size", "mamba_d_state", "state_size"))


def recurrent_width(keys: Keys) -> int:
    """A recurrent layer takes several float32 values for each of these features; 0 without such layers."""
    if is_mamba(keys):
        heads, dim = _mamba_heads(keys)
        return WIDE_PARTS * heads * dim
    if "linear_num_value_heads" in keys:
        return WIDE_PARTS * keys.size("linear_num_value_heads") * keys.size("linear_value_head_dim", default=128)
    stated = keys.section("linear_attn_config")
    heads = stated.number("num_heads", default=keys.number("linear_num_heads", default=0))
    return WIDE_PARTS * heads * stated.size("head_dim", default=keys.size("linear_head_dim", default=128))


def _mamba_heads(keys: Keys) -> tuple[int, int]:
    """(heads, features a head)"""
    heads = keys.size("mamba_num_heads", "mamba_n_heads", "num_heads")
    if keys.find("mamba_d_head") == "auto":
        width = keys.size("mamba_d_ssm", default=keys.size("mamba_expand", default=2) * keys.size("hidden_size"))
        return heads, width // heads
    return heads, keys.size("mamba_head_dim", "mamba_d_head", "head_dim")


def mamba_layer(keys: Keys) -> LayerShape:
    """Mamba 2, under the keys of Nemotron-H, of Granite 4, of Falcon-H1 or of Mamba 2 itself."""
    hidden = keys.size("hidden_size")
    heads, dim = _mamba_heads(keys)
    state = keys.size("ssm_state_size", "mamba_d_state", "state_size")
    groups = keys.size("n_groups", "mamba_n_groups", default=8)
    kernel = keys.size("conv_kernel", "mamba_d_conv", default=4)
    width, shared = heads * dim, 2 * groups * state
    has_conv_bias = keys.flag("use_conv_bias", keys.flag("mamba_conv_bias", True))
    conv = kernel + (1 if has_conv_bias else 0)

    def of_heads(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "heads", heads, "plain" if plain else "linear", kv_heads=groups)

    def of_groups(count: int, *, plain: bool = False) -> Weight:
        return Weight(count, "kv_heads", groups, "plain" if plain else "linear")

    weights = [
        of_heads(hidden * (2 * width + heads)),
        of_groups(hidden * shared),
        of_heads(hidden * width),
        of_heads(width * conv, plain=True),
        of_groups(shared * conv, plain=True),
        Weight(3 * heads, "heads", heads, "float32", kv_heads=groups),
    ]
    if keys.flag("mamba_rms_norm", True):
        weights.append(of_heads(width, plain=True))
    has_bias = keys.flag("mamba_proj_bias") or keys.flag("use_bias")
    if has_bias:
        weights += [of_heads(2 * width + heads, plain=True), of_groups(shared, plain=True)]
    if keys.flag("projectors_bias", has_bias):
        weights.append(whole(hidden))
    mixer = RecurrentShape(
        heads, heads * dim * state, width * (kernel - 1), "Mamba 2", num_groups=groups,
        group_conv_count=shared * (kernel - 1),
    )  # fmt: skip
    return LayerShape(mixer, tuple(weights))
