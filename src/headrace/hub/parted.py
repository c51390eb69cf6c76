"""Layers whose cache has parts of several reaches, residual streams and attention over residuals, in numbers.

Formulas: DeepSeek-V4 (DeepSeek-AI 2026), hyper-connections (Xie et al. 2026), DSA over pooled keys (GLM-5.3-Flash,
Zhipu AI 2026), Attention Residuals (Kimi Team 2026); tensors as transformers names them.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.hub.errors import ModelError
from headrace.hub.keys import Keys
from headrace.hub.mixers import latent_layer, whole
from headrace.hub.shape import LatentShape, LayerShape, PartedShape, PartShape, Weight

SLIDING, LIGHT, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: SLIDING, 4: LIGHT, 128: HEAVY}
RATES = {LIGHT: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
HASHED = "hash_moe"


def is_compressed(keys: Keys) -> bool:
    """Attention over a window and compressed tokens (DeepSeek-V4)."""
    return "o_groups" in keys and "o_lora_rank" in keys


def compressed_kinds(keys: Keys) -> list[str]:
    """By layer, as the model reads them."""
    count = keys.size("num_hidden_layers")
    listed, ratios = keys.words("layer_types"), keys.find("compress_ratios")
    if listed is None and isinstance(ratios, list):
        listed = [RATIOS.get(ratio, "") for ratio in ratios[:count]]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if listed is None:
        listed = [HEAVY if layer < 2 or layer % 2 == 0 else LIGHT for layer in range(count)]
    if len(listed) != count or set(listed) - set(RATIOS.values()):
        raise ModelError(
            f"{keys.place}: layer_types must state {', '.join(RATIOS.values())} for each of {count} layers"
        )
    return listed


def is_hashed(keys: Keys, index: int) -> bool:
    """Whether a layer's experts are chosen by token ids."""
    listed = keys.words("mlp_layer_types")
    if listed is not None:
        return index < len(listed) and listed[index] == HASHED
    return index < keys.number("num_hash_layers", default=3)


def compressed_layer(keys: Keys, kind: str) -> LayerShape:
    """kind: as a config names it."""
    hidden, heads, groups = keys.size("hidden_size"), keys.size("num_attention_heads"), keys.size("o_groups")
    dim, query, out = keys.size("head_dim"), keys.size("q_lora_rank"), keys.size("o_lora_rank")
    if heads % groups:
        raise ModelError(f"{keys.place}: o_groups {groups} does not divide num_attention_heads {heads}")

    def of_groups(count: int) -> Weight:
        return Weight(count, "kv_heads", groups)

    weights = [
        Weight(hidden * (query + dim)),
        whole(query + dim),
        Weight(query * heads * dim, "heads", heads, kv_heads=groups),
        Weight(heads, "heads", heads, "float32", kv_heads=groups),
        of_groups(out * heads * dim),
        of_groups(groups * out * hidden),
    ]
    attending = 4 * heads * dim  # a key is its own value
    parts = [PartShape((("keys", dim),), window=keys.size("sliding_window"), head_ops=attending)]
    if kind in RATES:
        own, default = RATES[kind]
        every = keys.section("compress_rates").size(kind, default=keys.size(own, default=default))
        overlap = 2 if kind == LIGHT else 1
        loose, entries = _loose("", overlap * dim), [("entries", dim)]
        weights += _compressor(hidden, dim, every, overlap)
        top, indexing, index_dim = None, 0, 0
        if kind == LIGHT:
            index_heads, index_dim = keys.size("index_n_heads"), keys.size("index_head_dim")
            weights += [*_compressor(hidden, index_dim, every, overlap), Weight(query * index_heads * index_dim)]
            weights.append(whole(hidden * index_heads))
            loose += _loose("index_", overlap * index_dim)
            entries.append(("index_entries", index_dim))
            top, indexing = keys.size("index_topk", default=512), 2 * index_heads * index_dim
        # A token is weighed once in each of `overlap` entries; it is in reach of `overlap * every` tokens.
        pooling = 2 * (dim + index_dim) // every
        parts.append(PartShape(tuple(loose), window=overlap * every, is_exact=True, own_ops=pooling))
        parts.append(PartShape(tuple(entries), every=every, head_ops=attending, own_ops=indexing, top=top))
    return LayerShape(PartedShape("compressed", heads, groups, tuple(parts)), tuple(weights))


def _loose(prefix: str, width: int) -> list[tuple[str, int]]:
    return [(f"{prefix}values", width), (f"{prefix}gates", width)]


def _compressor(hidden: int, dim: int, every: int, overlap: int) -> list[Weight]:
    return [whole(2 * hidden * overlap * dim + dim), Weight(every * overlap * dim, form="float32")]


def pooled_latent_layer(keys: Keys, *, is_indexed: bool) -> LayerShape:
    """Latent attention whose indexer scores pools of tokens."""
    layer = latent_layer(keys, is_indexed=is_indexed)
    if not is_indexed:
        return layer
    hidden, dim, every = keys.size("hidden_size"), keys.size("index_head_dim"), keys.size("index_kpool")
    latent = layer.mixer
    assert isinstance(latent, LatentShape)
    heads = latent.num_heads
    attending = 2 * heads * (2 * latent.latent_dim + latent.rope_dim)
    parts = (
        PartShape((("latent", latent.latent_dim + latent.rope_dim),), head_ops=attending, top=latent.top),
        PartShape((("index_values", dim), ("index_gates", dim)), window=every, is_exact=True, own_ops=2 * dim // every),
        PartShape((("index_entries", dim),), every=every, own_ops=2 * latent.index_heads * dim),
    )
    mixer = PartedShape("pooled", heads, heads, parts)
    return replace(layer, mixer=mixer, weights=(*layer.weights, whole(dim * (hidden + every))))


def stream_weights(keys: Keys) -> tuple[Weight, ...]:
    """Of one layer's hyper-connections; () where a model has one residual stream."""
    if "hc_mult" not in keys:
        return ()
    count, hidden = keys.size("hc_mult"), keys.size("hidden_size")
    outputs = (2 + count) * count
    return (Weight(2 * (outputs * count * hidden + outputs + 3), form="float32"),)


def stream_head(keys: Keys) -> Weight:
    """What joins the streams behind the last layer."""
    count, hidden = keys.size("hc_mult"), keys.size("hidden_size")
    return Weight(count * count * hidden + count + 1, form="float32")


def stream_width(keys: Keys) -> int:
    """Streams and their wider copies count as an MLP's features."""
    return 3 * keys.number("hc_mult", default=0) * keys.number("hidden_size", default=0)


def depth_weights(keys: Keys, index: int) -> tuple[Weight, ...]:
    """Of one layer's two mixes, and of the one behind the last layer: a norm and a score's projection each."""
    if "attn_res_block_size" not in keys:
        return ()
    num_mixes = 3 if index == keys.size("num_hidden_layers") - 1 else 2
    return (whole(2 * num_mixes * keys.size("hidden_size")),)


DEPTH_COPIES = 8
"""Hidden states that a mix's copies in float32 take the place of."""


def depth_width(keys: Keys) -> int:
    """The sums of a token that travel between layers, and a mix's wider copies, count as an MLP's features."""
    if "attn_res_block_size" not in keys:
        return 0
    num_sums = -(-keys.size("num_hidden_layers") // keys.size("attn_res_block_size")) + 1
    return (num_sums + DEPTH_COPIES) * keys.size("hidden_size") // 2
