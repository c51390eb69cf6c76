"""Qwen3 with a mixture of experts (Qwen team 2025): norms on queries and keys, softmax routing, no shared expert."""

from __future__ import annotations

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, QK_NORM_RULES, PreNormLayer
from headrace.layers.experts import expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.models._qwen_moe import qwen_mlp

__all__ = ["Qwen3MoeModel"]

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
}
"""What transformers takes for keys that a config leaves out."""

RULES = {
    **PRE_NORM_RULES,
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
    **QK_NORM_RULES,
}


class Qwen3MoeModel(CausalLm):
    """Pre-norm decoder; some layers may have a dense MLP, all may use a sliding window."""

    model_types = ("qwen3_moe",)
    layer_kinds = frozenset({"full", "window"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, index),
            rules=RULES,
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    head_dim, has_bias = config.head_dim(), config.flag("attention_bias", False)
    slides = config.flag("use_sliding_window", False)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            window=config.optional_integer("sliding_window") if slides else None,
            qkv_bias=has_bias,
            out_bias=has_bias,
            q_norm=factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps),
            k_norm=factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=qwen_mlp(config, factory, f"{name}.mlp", index, count=128),
    )
