"""Nemotron-H and Nemotron 3 (NVIDIA 2025): layers of one part each, Mamba-2, attention without rope, MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import COMMON_RULES
from headrace.layers.experts import ExpertAct, Experts, corrected_routing, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.latent_experts import experts_latent
from headrace.layers.mamba import MambaSizes, mamba, mamba_fused, mamba_rules, time_limits
from headrace.layers.mlp import PlainMlp
from headrace.layers.port import Layer
from headrace.layers.recurrent import state_dtype
from headrace.layers.single import AttentionLayer, MlpLayer, StateLayer

__all__ = ["NemotronHModel"]

MAMBA, FULL, EXPERTS, DENSE = "linear_attention", "full_attention", "moe", "mlp"
OLD_NAMES = {"mamba": MAMBA, "attention": FULL}
LETTERS = {"M": MAMBA, "*": FULL, "E": EXPERTS, "-": DENSE}

BLOCK = "model.layers.*.mixer"
RULES: Mapping[str, str] = {
    "model.embed_tokens.weight": COMMON_RULES["model.embed_tokens.weight"],
    "model.norm.weight": COMMON_RULES["model.norm.weight"],
    "lm_head.weight": COMMON_RULES["lm_head.weight"],
    "model.layers.*.norm.weight": "layers.*.norm.weight",
    **mamba_rules(BLOCK, "layers.*.mamba"),
    **{f"{BLOCK}.{slot}_proj.*": f"layers.*.attention.qkv.*:{slot}" for slot in ("q", "k", "v")},
    f"{BLOCK}.k_proj.k_scale": "layers.*.attention.qkv.k_scale:k",
    f"{BLOCK}.v_proj.v_scale": "layers.*.attention.qkv.v_scale:v",
    f"{BLOCK}.o_proj.*": "layers.*.attention.out.*",
    **expert_rules(BLOCK, "layers.*.mlp"),
    f"{BLOCK}.shared_experts.up_proj.*": "layers.*.mlp.shared.up.*:up",
    f"{BLOCK}.fc1_latent_proj.*": "layers.*.mlp.into_latent.*",
    f"{BLOCK}.fc2_latent_proj.*": "layers.*.mlp.from_latent.*",
    f"{BLOCK}.up_proj.*": "layers.*.mlp.up.*:up",
    f"{BLOCK}.down_proj.*": "layers.*.mlp.down.*",
}
RENAMED = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
}
DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
"""What transformers takes for keys that a config leaves out."""


class NemotronHModel(CausalLm):
    """Step sizes are cut to `time_step_limit` in prefill and decode alike, as the published code does it.

    transformers 5.24 cuts them to `time_step_min` instead, which is of how they are drawn before training; the result
    is the same where none is as small.
    """

    model_types = ("nemotron_h",)
    layer_kinds = frozenset({"full", "state"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        kinds = _kinds(config)
        config = HfConfig({**config, "num_hidden_layers": len(kinds)}, place=config.place)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kinds[index]),
            rules=RULES,
            norm=factory.norm("norm", config.integer("hidden_size"), eps=config.number("layer_norm_epsilon")),
            ropes={},
            positions=config.integer("max_position_embeddings"),
            kept=("mtp.**", "model.mtp.**"),
            fused=mamba_fused(BLOCK, _mamba_sizes(config)) if MAMBA in kinds else {},
            renamed=RENAMED,
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, kind: str) -> Layer:
    hidden_size, eps = config.integer("hidden_size"), config.number("layer_norm_epsilon")
    norm = factory.norm(f"{name}.norm", hidden_size, eps=eps)
    if kind == MAMBA:
        mixer = mamba(
            factory,
            f"{name}.mamba",
            hidden_size=hidden_size,
            sizes=_mamba_sizes(config),
            eps=eps,
            state_dtype=state_dtype(factory, config),
        )
        return StateLayer(norm=norm, mixer=mixer)
    if kind == FULL:
        has_bias = config.flag("attention_bias", False)
        attention = factory.attention(
            f"{name}.attention", **config.heads(), rope=None, qkv_bias=has_bias, out_bias=has_bias
        )
        return AttentionLayer(norm=norm, attention=attention)
    return MlpLayer(norm=norm, mlp=_mlp(config, factory, name, kind))


def _mlp(config: HfConfig, factory: LayerFactory, name: str, kind: str) -> PlainMlp | Experts:
    hidden_size, act = config.integer("hidden_size"), config.text("mlp_hidden_act", "relu2")
    has_bias = config.flag("mlp_bias", False)
    if kind == DENSE:
        return factory.plain_mlp(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            act=act,
            bias=has_bias,
        )
    if act != "relu2" or has_bias:
        raise ValueError(f"{config.place}: experts with mlp_hidden_act {act!r} or mlp_bias are not known: only relu2")
    latent = config.optional_integer("moe_latent_size")
    return factory.experts(
        f"{name}.mlp",
        hidden_size=hidden_size,
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=corrected_routing(config, config.integer("n_routed_experts")),
        act=ExpertAct("relu2", is_gated=False),
        router_dtype=torch.float32,
        has_correction=True,
        shared_size=config.integer("moe_shared_expert_intermediate_size"),
        shared_act=act,
        latent=experts_latent(factory, f"{name}.mlp", hidden_size=hidden_size, size=latent),
    )


def _mamba_sizes(config: HfConfig) -> MambaSizes:
    config.only({"mamba_hidden_act": "silu"})
    return MambaSizes(
        num_heads=config.integer("mamba_num_heads"),
        dim=config.integer("mamba_head_dim"),
        num_groups=config.integer("n_groups"),
        state=config.integer("ssm_state_size"),
        kernel=config.integer("conv_kernel", least=2),
        time_limits=time_limits(config),
        has_conv_bias=config.flag("use_conv_bias", True),
        has_bias=config.flag("use_bias", False),
    ).checked(config.place)


def _kinds(config: HfConfig) -> list[str]:
    """`layers_block_type`, or `hybrid_override_pattern` with a letter a layer."""
    pattern = config.get("hybrid_override_pattern")
    stated = config.words("layers_block_type")
    if stated is None and isinstance(pattern, str):
        stated = [LETTERS.get(letter, letter) for letter in pattern]
    if not stated:
        raise ValueError(f"{config.place}: layers_block_type or hybrid_override_pattern must state each layer's kind")
    kinds = [OLD_NAMES.get(kind, kind) for kind in stated]
    unknown = sorted({str(kind) for kind in kinds} - set(LETTERS.values()))
    if unknown:
        raise ValueError(f"{config.place}: unknown kinds of layers {unknown}: known are {', '.join(LETTERS.values())}")
    return kinds
