"""Which layers of a model do what, as its config states it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.hub.errors import ModelError
from headrace.hub.keys import Keys
from headrace.hub.mixers import Traits, Windows
from headrace.hub.parted import compressed_kinds, is_compressed

MAX_LAYERS = 10_000
HALVES = "state + heads, MLP"

FULL, SLIDING, INDEXED, LINEAR, EXPERTS, DENSE = "full", "sliding", "indexed", "linear", "experts", "dense"
KINDS = {
    "full_attention": FULL, "sliding_attention": SLIDING, "chunked_attention": SLIDING, "indexed_attention": INDEXED,
    "minimax_m3_sparse": INDEXED, "linear_attention": LINEAR, "mamba": LINEAR, "attention": FULL, "moe": EXPERTS,
    "mlp": DENSE,
}  # fmt: skip
PATTERN_KINDS = {"M": LINEAR, "*": FULL, "E": EXPERTS, "-": DENSE}


def layer_kinds(keys: Keys, traits: Traits) -> list[str]:
    """By layer: one of FULL, SLIDING, INDEXED, LINEAR, or of a layer without attention EXPERTS or DENSE; of layers that
    compress, what the config calls them."""
    if is_compressed(keys):
        return compressed_kinds(keys)
    if traits.parts == HALVES:
        return [LINEAR, FULL] * _num_layers(keys)
    kinds = _listed(keys)
    if kinds is None:
        kinds = _unlisted(keys, traits, _num_layers(keys))
    if traits.windows.by_flag and not _uses_windows(keys):
        kinds = [FULL if kind == SLIDING else kind for kind in kinds]
    return [*kinds[:-1], FULL] if traits.windows.ends_full else kinds


def _listed(keys: Keys) -> list[str] | None:
    listed = keys.words("layers_block_type", "layer_types")
    pattern = keys.find("hybrid_override_pattern")
    if listed is not None:
        kinds = [KINDS.get(kind, FULL) for kind in listed]
        return [INDEXED if kind == FULL and _is_indexed_everywhere(keys) else kind for kind in kinds]
    return [PATTERN_KINDS.get(letter, FULL) for letter in pattern] if isinstance(pattern, str) else None


def _unlisted(keys: Keys, traits: Traits, count: int) -> list[str]:
    """Of a config that lists no kinds."""
    if traits.is_recurrent:
        return [LINEAR] * count
    if "index_kpool" in keys:
        return [LINEAR if (layer + 1) % 4 else INDEXED for layer in range(count)]
    if "linear_attn_config" in keys:
        full: list[int] = keys.section("linear_attn_config").find("full_attn_layers") or []
        return [FULL if layer + 1 in full else LINEAR for layer in range(count)]
    if "linear_num_heads" in keys:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    if "linear_num_value_heads" in keys:
        every = keys.size("full_attention_interval", default=4)
        return [LINEAR if (layer + 1) % every else FULL for layer in range(count)]
    sparse = keys.section("sparse_attention_config").find("sparse_attention_freq")
    if isinstance(sparse, list):
        return [INDEXED if flag else FULL for flag in sparse]  # pyright: ignore[reportUnknownVariableType]
    if _is_indexed_everywhere(keys):
        return [INDEXED] * count
    return [SLIDING if slides else FULL for slides in _sliding(keys, traits.windows, range(count))]


def _sliding(keys: Keys, windows: Windows, layers: Sequence[int]) -> list[bool]:
    """Whether each of these layers attends over a window, in a config that lists no kinds."""
    has_window = "sliding_window" in keys
    pattern = keys.find("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and has_window:  # EXAONE 4: LLLG, local and global
        return [pattern[layer % len(pattern)] == "L" for layer in layers]
    if "no_rope_layer_interval" in keys:
        turned = _turned_layers(keys, len(layers))
        if "intermediate_size_mlp" in keys:  # Llama 4
            return [turns and "attention_chunk_size" in keys for turns in turned]
        return [not turns and _uses_windows(keys) for turns in turned]  # SmolLM3
    every = keys.number("sliding_window_pattern", default=windows.full_every)
    if every and has_window:
        return [(layer + 1) % every != 0 for layer in layers]
    if windows.early:
        return [
            _uses_windows(keys) and layer % 2 == 0 and layer < keys.number("max_window_layers", default=0)
            for layer in layers
        ]
    if (windows.everywhere or keys.flag("use_sliding_window")) and has_window:
        first = 0 if windows.everywhere else keys.number("max_window_layers", default=0)
        return [layer >= first for layer in layers]
    return [False for _ in layers]


def _uses_windows(keys: Keys) -> bool:
    return keys.flag("use_sliding_window") and "sliding_window" in keys


def _num_layers(keys: Keys) -> int:
    count = keys.size("num_hidden_layers")
    if count > MAX_LAYERS:
        raise ModelError(f"{keys.place}: num_hidden_layers must be at most {MAX_LAYERS}, not {count}")
    return count


def _turned_layers(keys: Keys, count: int) -> list[bool]:
    """Whether rope turns the heads of each layer. `no_rope_layers` lists 1 for those."""
    stated, every = keys.find("no_rope_layers"), keys.size("no_rope_layer_interval")
    if isinstance(stated, list) and stated:
        return [bool(turned) for turned in stated[:count]]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [(layer + 1) % every != 0 for layer in range(count)]


def _is_indexed_everywhere(keys: Keys) -> bool:
    """DeepSeek Sparse Attention."""
    return "kv_lora_rank" in keys and "index_topk" in keys
