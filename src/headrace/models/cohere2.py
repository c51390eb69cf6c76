"""Command R7B and Command A (Cohere 2024): attention and MLP side by side behind one layer norm; rope, of neighbouring
features, in the sliding-window layers alone."""

from __future__ import annotations

from headrace.layers.blocks import ParallelLayer
from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import COMMON_RULES
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.window import SLIDING, layer_kinds

__all__ = ["Cohere2Model"]

DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}
"""What transformers takes for keys that a config leaves out."""

RULES = {**COMMON_RULES, "model.layers.*.input_layernorm.weight": "layers.*.input_norm.weight"}


class Cohere2Model(CausalLm):
    model_types = ("cohere2",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        kinds = layer_kinds(config, sliding_pattern=config.integer("sliding_window_pattern"))
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kind=kinds[index]),
            rules=RULES,
            norm=factory.layer_norm("norm", config.integer("hidden_size"), eps=config.number("layer_norm_eps")),
            logit_scale=config.number("logit_scale"),
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, kind: str) -> ParallelLayer:
    has_bias, is_sliding = config.flag("attention_bias", False), kind == SLIDING
    eps = config.number("layer_norm_eps")
    return ParallelLayer(
        input_norm=factory.layer_norm(f"{name}.input_norm", config.integer("hidden_size"), eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all" if is_sliding else None,
            interleaved=True,
            window=config.integer("sliding_window") if is_sliding else None,
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp=gated_mlp(config, factory, name),
    )
