"""Llama 4, text (Meta 2025): attention within chunks, layers without rope, experts fed by their token's weight."""

from __future__ import annotations

from headrace.layers.attention import Attention
from headrace.layers.causal import TEXT_PREFIXES, CausalLm, text_section
from headrace.layers.decoder import COMMON_RULES, PRE_NORM_RULES, PreNormLayer
from headrace.layers.experts import Experts, Routing, expert_act, expert_rules, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.heads import HeadStep, Temperature, TurnedNorms
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.rope import rope_settings

__all__ = ["Llama4Model"]

EPS = 1e-5
DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
"""What transformers takes for keys that a config leaves out."""

THETA = 500_000.0
CHUNKED, FULL = "chunked_attention", "full_attention"

RULES = {
    **{name: target for name, target in PRE_NORM_RULES.items() if ".mlp." not in name},
    **{name.replace(".mlp.", ".feed_forward."): target for name, target in COMMON_RULES.items() if ".mlp." in name},
    **expert_rules("model.layers.*.feed_forward", "layers.*.mlp", router="router", shared="shared_expert"),
}

VISION_NAMES = (
    "vision_model.**",
    "multi_modal_projector.**",
    "model.vision_model.**",
    "model.multi_modal_projector.**",
)
"""What multimodal checkpoints hold beside the language model."""


class Llama4Model(CausalLm):
    """The text model, also of multimodal checkpoints; images are not read."""

    model_types = ("llama4_text", "llama4")
    layer_kinds = frozenset({"full", "window"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        text = (text_section(config) if "text_config" in config else config).with_defaults(DEFAULTS)
        super().__init__(
            text,
            factory,
            layer=lambda name, index: _layer(text, factory, name, index),
            rules=RULES,
            eps=EPS,
            ropes={"all": factory.rotary(rope_settings(text, default_theta=THETA), text.head_dim())},
            ignored=VISION_NAMES,
            renamed=TEXT_PREFIXES,
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", EPS)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=_attention(config, factory, f"{name}.attention", index),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=_mlp(config, factory, f"{name}.mlp", index),
    )


def _attention(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Attention:
    head_dim, has_bias, turns = config.head_dim(), config.flag("attention_bias", False), _turns(config, index)
    steps: list[HeadStep] = []
    if turns and config.flag("use_qk_norm", True):
        norm = factory.unit_norm(head_dim, eps=config.number("rms_norm_eps", EPS))
        steps.append(TurnedNorms(norm, norm))
    if not turns and _is_tuned(config):
        steps.append(Temperature(config.number("attn_scale"), config.integer("floor_scale"), offset=1))
    is_chunked = _kind(config, index) == CHUNKED
    return factory.attention(
        name,
        **config.heads(),
        rope="all" if turns else None,
        interleaved=True,
        steps=steps,
        window=config.integer("attention_chunk_size") if is_chunked else None,
        is_chunked=is_chunked,
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _is_tuned(config: HfConfig) -> bool:
    """A flag, for which released configs state 4 as well; any number but 0 is yes."""
    if isinstance(config.get("attn_temperature_tuning", True), bool):
        return config.flag("attn_temperature_tuning", True)
    return config.integer("attn_temperature_tuning", least=0) > 0


def _turns(config: HfConfig, index: int) -> bool:
    """Whether rope turns a layer's heads: as listed (0 is no), else in all but every fourth."""
    listed = config.marks("no_rope_layers")
    if listed:
        _check_list(config, "no_rope_layers", listed)
        return listed[index]
    return (index + 1) % config.integer("no_rope_layer_interval") != 0


def _kind(config: HfConfig, index: int) -> str:
    """Within chunks, as listed, else in layers with rope."""
    listed = config.get("layer_types")
    if listed is None:
        return CHUNKED if "attention_chunk_size" in config and _turns(config, index) else FULL
    _check_list(config, "layer_types", listed)
    if listed[index] not in (CHUNKED, FULL):
        raise ValueError(
            f"{config.place}: layer_types has the unknown {listed[index]!r}: it states {CHUNKED} or {FULL}"
        )
    return listed[index]


def _check_list(config: HfConfig, key: str, listed: object) -> None:
    if not isinstance(listed, list) or len(listed) < config.integer("num_hidden_layers"):
        raise ValueError(f"{config.place}: {key} must list all {config.integer('num_hidden_layers')} layers")


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    hidden_size, act = config.integer("hidden_size"), config.text("hidden_act", "silu")
    sparse = config.get("moe_layers")
    every = config.integer("interleave_moe_layer_step")
    if sparse is not None and not isinstance(sparse, list):
        raise ValueError(f"{config.place}: moe_layers must be a list of layers, not {sparse!r}")
    has_experts = (index + 1) % every == 0 if sparse is None else index in sparse
    if not has_experts:
        inner = config.integer("intermediate_size_mlp")
        return factory.mlp(name, hidden_size=hidden_size, intermediate_size=inner, act=act)
    inner = config.integer("intermediate_size")
    return factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=inner,
        routing=Routing(
            num_experts=num_experts(config, 16),
            top_k=config.integer("num_experts_per_tok"),
            scoring="sigmoid_top",
        ),
        act=expert_act(act),
        shared_size=inner,
        shared_act=act,
        fused="in_out",
        weighs_input=True,
    )
