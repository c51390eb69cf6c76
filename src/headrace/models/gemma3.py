"""Gemma 3, text (Gemma team 2025): sliding-window layers between full ones, each kind with a rope of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.layers.blocks import SandwichLayer
from headrace.layers.causal import TEXT_PREFIXES
from headrace.layers.decoder import QK_NORM_RULES, ROTARY_NAMES, SANDWICH_RULES, Decoder
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.norm import Norm
from headrace.layers.rope import RopeSettings, rope_settings
from headrace.layers.weights import WeightMap
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["Gemma3Model"]

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
"""What transformers takes for keys that a config leaves out; the published configs leave out many."""

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0

RULES = {**SANDWICH_RULES, **QK_NORM_RULES}

VISION_NAMES = (
    "model.vision_tower.**",
    "model.multi_modal_projector.**",
    "vision_tower.**",
    "multi_modal_projector.**",
)
"""What multimodal checkpoints hold beside the language model."""


class Gemma3Model(Decoder):
    """The text model, also of multimodal checkpoints; images are not read."""

    model_types = ("gemma3_text", "gemma3")
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        text, is_tied = _text_config(config)
        hidden_size, vocab_size = text.integer("hidden_size"), text.integer("vocab_size")
        kinds = layer_kinds(text, sliding_pattern=text.integer("sliding_window_pattern"))
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        factory.read(WeightMap((), RULES, (*ROTARY_NAMES, *VISION_NAMES), tied, TEXT_PREFIXES))
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        super().__init__(
            embedding=embedding,
            layers=[_layer(text, factory, f"layers.{i}", kind=kind) for i, kind in enumerate(kinds)],
            norm=factory.norm("norm", hidden_size, eps=text.number("rms_norm_eps", 1e-6), plus_one=True),
            head=factory.head(
                "head",
                vocab_size,
                hidden_size,
                tied_to=embedding if is_tied else None,
                soft_cap=text.optional_number("final_logit_softcapping"),
            ),
            ropes={kind: factory.rotary(_rope_settings(text, kind), text.head_dim()) for kind in sorted(set(kinds))},
            max_position=text.integer("max_position_embeddings"),
        )
        # In the dtype of the weights, as the model was trained: in bfloat16 the root of 3072 is 55.5, not 55.4256.
        self.embedding_scale = torch.tensor(hidden_size**0.5, dtype=factory.dtype, device=factory.device)
        self._weights = factory.weight_map()

    def weight_map(self) -> WeightMap:
        return self._weights

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.embedding_scale


def _text_config(config: HfConfig) -> tuple[HfConfig, bool]:
    """(the language model's config, whether head and embedding are tied). Either config may state the tie."""
    text = config.section("text_config") if "text_config" in config else config
    text = text.with_defaults(DEFAULTS)
    if text.flag("use_bidirectional_attention", False):
        raise ValueError(f"{text.place}: use_bidirectional_attention is for embedding models, which are not served")
    return text, text.flag("tie_word_embeddings", config.flag("tie_word_embeddings", True))


def _rope_settings(config: HfConfig, kind: str) -> RopeSettings:
    """`rope_parameters` by layer type; older configs scale full layers only and name the local base apart."""
    if "rope_parameters" in config:
        stated = config.section("rope_parameters")
        if FULL not in stated and SLIDING not in stated:
            raise ValueError(f"{config.place}: rope_parameters must be given by layer type ({FULL}, {SLIDING})")
        return rope_settings(config, layer_type=kind, default_theta=GLOBAL_THETA if kind == FULL else LOCAL_THETA)
    if kind == FULL:
        return rope_settings(config, default_theta=GLOBAL_THETA)
    local = {"rope_theta": config.number("rope_local_base_freq", LOCAL_THETA)}
    return rope_settings({**config, "rope_scaling": None, **local}, default_theta=LOCAL_THETA)


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, kind: str) -> SandwichLayer:
    hidden_size, head_dim = config.integer("hidden_size"), config.head_dim()
    eps = config.number("rms_norm_eps", 1e-6)
    has_bias = config.flag("attention_bias", False)

    def norm(part: str) -> Norm:
        return factory.norm(f"{name}.{part}", hidden_size, eps=eps, plus_one=True)

    return SandwichLayer(
        input_norm=norm("input_norm"),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope=kind,
            scale=config.positive("query_pre_attn_scalar") ** -0.5,
            window=config.integer("sliding_window") if kind == SLIDING else None,
            soft_cap=config.optional_number("attn_logit_softcapping"),
            qkv_bias=has_bias,
            out_bias=has_bias,
            q_norm=factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps, plus_one=True),
            k_norm=factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps, plus_one=True),
        ),
        attention_post_norm=norm("attention_post_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=factory.mlp(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            act=config.text("hidden_activation", "gelu_pytorch_tanh"),
        ),
        mlp_post_norm=norm("mlp_post_norm"),
    )
