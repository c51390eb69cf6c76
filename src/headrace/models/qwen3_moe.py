"""Qwen3 with a mixture of experts (Qwen team 2025): norms on queries and keys, softmax routing, no shared expert."""

from __future__ import annotations

from headrace.layers.decoder import PRE_NORM_RULES, ROTARY_NAMES, Decoder, PreNormLayer
from headrace.layers.experts import Experts, Routing, expert_act, expert_rules, is_sparse, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.rope import max_position, rope_settings
from headrace.layers.weights import WeightMap

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
    "model.layers.*.self_attn.q_norm.weight": "layers.*.attention.q_norm.weight",
    "model.layers.*.self_attn.k_norm.weight": "layers.*.attention.k_norm.weight",
}


class Qwen3MoeModel(Decoder):
    """Pre-norm decoder; some layers may have a dense MLP, all may use a sliding window."""

    model_types = ("qwen3_moe",)
    layer_kinds = frozenset({"full", "window"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        is_tied = config.flag("tie_word_embeddings", False)
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        super().__init__(
            embedding=embedding,
            layers=[_layer(config, factory, index) for index in range(config.integer("num_hidden_layers"))],
            norm=factory.norm("norm", hidden_size, eps=config.number("rms_norm_eps", 1e-6)),
            head=factory.head("head", vocab_size, hidden_size, tied_to=embedding if is_tied else None),
            ropes={"all": factory.rotary(rope_settings(config), config.head_dim())},
            max_position=max_position(config),
        )
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        self._weights = factory.weight_map(RULES, ignored=ROTARY_NAMES, tied=tied)

    def weight_map(self) -> WeightMap:
        return self._weights


def _layer(config: HfConfig, factory: LayerFactory, index: int) -> PreNormLayer:
    name, hidden_size, eps = f"layers.{index}", config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    head_dim, has_bias = config.head_dim(), config.flag("attention_bias", False)
    slides = config.flag("use_sliding_window", False)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=config.integer("num_attention_heads"),
            num_kv_heads=config.num_kv_heads(),
            head_dim=head_dim,
            rope="all",
            window=config.optional_integer("sliding_window") if slides else None,
            qkv_bias=has_bias,
            out_bias=has_bias,
            q_norm=factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps),
            k_norm=factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=_mlp(config, factory, f"{name}.mlp", index),
    )


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    hidden_size, act = config.integer("hidden_size"), config.text("hidden_act", "silu")
    if not is_sparse(config, index):
        return factory.mlp(
            name, hidden_size=hidden_size, intermediate_size=config.integer("intermediate_size"), act=act
        )
    return factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=Routing(
            num_experts=num_experts(config, 128),
            top_k=config.integer("num_experts_per_tok"),
            normalise=config.flag("norm_topk_prob", False),
        ),
        act=expert_act(act),
    )
