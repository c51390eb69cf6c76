"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's structure with biases on q, k and v."""

from __future__ import annotations

from headrace.layers.decoder import PRE_NORM_RULES, ROTARY_NAMES, Decoder, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import max_position, rope_settings
from headrace.layers.weights import WeightMap
from headrace.layers.window import layer_windows

__all__ = ["Qwen2Model"]

DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
"""What transformers takes for keys that a config leaves out."""


class Qwen2Model(Decoder):
    """Pre-norm decoder; its later layers may use a sliding window."""

    model_types = ("qwen2",)

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        eps = config.number("rms_norm_eps", 1e-6)
        is_tied = config.flag("tie_word_embeddings", False)
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        windows = layer_windows(config)
        super().__init__(
            embedding=embedding,
            layers=[_layer(config, factory, f"layers.{i}", window=window) for i, window in enumerate(windows)],
            norm=factory.norm("norm", hidden_size, eps=eps),
            head=factory.head("head", vocab_size, hidden_size, tied_to=embedding if is_tied else None),
            ropes={"all": factory.rotary(rope_settings(config), config.head_dim())},
            max_position=max_position(config),
        )
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        self._weights = factory.weight_map(PRE_NORM_RULES, ignored=ROTARY_NAMES, tied=tied)

    def weight_map(self) -> WeightMap:
        return self._weights


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, window: int | None) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=config.integer("num_attention_heads"),
            num_kv_heads=config.num_kv_heads(),
            head_dim=config.head_dim(),
            rope="all",
            window=window,
            qkv_bias=True,
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=factory.mlp(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            act=config.text("hidden_act", "silu"),
        ),
    )
