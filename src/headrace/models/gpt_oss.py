"""gpt-oss (OpenAI 2025): attention sinks, every other layer with a window, experts with biases and a cut SwiGLU."""

from __future__ import annotations

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.experts import ExpertAct, Routing, expert_rules, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import rope_settings
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["GptOssModel"]

EPS = 1e-5
DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
}
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes for keys that a config leaves out."""

THETA = 150_000.0
GAIN, LIMIT = 1.702, 7.0
"""Of the SwiGLU: published configs state the limit only."""

RULES = {
    **PRE_NORM_RULES,
    **expert_rules("model.layers.*.mlp", "layers.*.mlp", router="router"),
    "model.layers.*.self_attn.sinks": "layers.*.attention.sinks.weight",
}


class GptOssModel(CausalLm):
    """Pre-norm decoder with experts in every layer."""

    model_types = ("gpt_oss",)
    layer_kinds = frozenset({"full", "window"})
    has_experts = True
    reads_mxfp4 = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        if "rope_scaling" not in config and "rope_parameters" not in config:
            config = HfConfig({**config, "rope_parameters": ROPE}, place=config.place)
        config = config.with_defaults(DEFAULTS)
        kinds = _kinds(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kinds[index]),
            rules=RULES,
            eps=EPS,
            ropes={"all": factory.rotary(rope_settings(config, default_theta=THETA), config.head_dim())},
        )


def _kinds(config: HfConfig) -> list[str]:
    if "layer_types" in config:
        return layer_kinds(config)
    return [FULL if index % 2 else SLIDING for index in range(config.integer("num_hidden_layers"))]


def _layer(config: HfConfig, factory: LayerFactory, name: str, kind: str) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", EPS)
    has_bias = config.flag("attention_bias", True)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            window=config.integer("sliding_window") if kind == SLIDING else None,
            qkv_bias=has_bias,
            out_bias=has_bias,
            has_sinks=True,
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=factory.experts(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            routing=Routing(
                num_experts=num_experts(config, 128),
                top_k=config.integer("num_experts_per_tok"),
                scoring="softmax_top",
            ),
            act=ExpertAct(
                limit=config.number("swiglu_limit", LIMIT),
                alpha=config.number("swiglu_alpha", GAIN),
                up_offset=1.0,
                is_interleaved=True,
            ),
            bias=True,
            router_bias=True,
            fused="in_out",
        ),
    )
