"""Kimi Linear (Kimi Team 2025): three layers of Kimi Delta Attention to one of latent attention, experts in most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.experts import Experts, corrected_routing, expert_act, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.kimi_delta import BLOCK, KimiDeltaSizes, beside_delta, full_layers, kimi_delta
from headrace.layers.latent import LatentSizes, latent_attention
from headrace.layers.mlp import Mlp, is_dense
from headrace.layers.pooled import no_features
from headrace.layers.port import Layer, Rope
from headrace.layers.recurrent import RecurrentPreNormLayer, state_dtype
from headrace.layers.rope import rope_settings
from headrace.layers.weights import Fused

__all__ = ["KimiLinearModel"]

LINEAR, FULL = "linear_attention", "full_attention"
EXPERTS = "model.layers.*.block_sparse_moe"

RULES: Mapping[str, str] = {
    **{name: place for name, place in PRE_NORM_RULES.items() if ".self_attn." not in name},
    **expert_rules(EXPERTS, "layers.*.mlp", names=("w1", "w3", "w2")),
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
    **{  # transformers writes dense layers under the experts' name
        f"{EXPERTS}.{stored}_proj.*": f"layers.*.mlp.gate_up.*:{stored}" for stored in ("gate", "up")
    },
    f"{EXPERTS}.down_proj.*": "layers.*.mlp.down.*",
}

ALIASES: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Published configs' keys -> those that transformers reads as well."""
ONLY: Mapping[str, Any] = {"hidden_act": "silu", "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
"""Keys with the one value that is known: no other is published."""
K3_KEYS = ("attn_res_block_size", "latent_moe_use_norm", "mla_use_output_gate", "routed_expert_hidden_size")
DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""What transformers takes for keys that a config leaves out."""


class KimiLinearModel(CausalLm):
    model_types = ("kimi_linear",)
    layer_kinds = frozenset({"latent", "state"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = _unified(config)
        kinds = _kinds(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, index, kinds[index]),
            rules={**RULES, **beside_delta(LatentSizes.of(config).rules, _full(kinds))},
            ropes={},
            positions=config.integer("max_position_embeddings"),
            fused=_fused(_sizes(config)),
        )

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        """Nothing is turned: the layers between know where a token is."""
        return {"all": no_features(positions)}


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int, kind: str) -> Layer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    input_norm = factory.norm(f"{name}.input_norm", hidden_size, eps=eps)
    mlp_norm = factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps)
    mlp = _mlp(config, factory, name, index)
    if kind == FULL:
        attention = latent_attention(
            factory,
            f"{name}.attention",
            hidden_size=hidden_size,
            sizes=LatentSizes.of(config),
            settings=rope_settings(config),
            bias=config.flag("attention_bias", False),
            interleaved=True,
        )
        return PreNormLayer(input_norm=input_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)
    mixer = kimi_delta(
        factory,
        f"{name}.delta",
        hidden_size=hidden_size,
        sizes=_sizes(config),
        eps=eps,
        state_dtype=state_dtype(factory, config),
    )
    return RecurrentPreNormLayer(input_norm=input_norm, mixer=mixer, mlp_norm=mlp_norm, mlp=mlp)


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    if is_dense(config, index, first=config.integer("first_k_dense_replace", 1, least=0)):
        return gated_mlp(config, factory, name)
    inner, act = config.integer("moe_intermediate_size"), config.text("hidden_act", "silu")
    return factory.experts(
        f"{name}.mlp",
        hidden_size=config.integer("hidden_size"),
        intermediate_size=inner,
        routing=corrected_routing(config, config.integer("num_local_experts")),
        act=expert_act(act),
        router_dtype=torch.float32,
        has_correction=True,
        shared_size=inner * config.integer("n_shared_experts"),
        shared_act=act,
    )


def _unified(config: HfConfig) -> HfConfig:
    """Published configs and those that transformers writes, under one set of keys."""
    of_k3 = sorted(key for key in K3_KEYS if config.get(key))
    if of_k3:
        raise ValueError(
            f"{config.place}: {', '.join(of_k3)}: those are keys of Kimi-K3: set model_kwargs: {{model_type: kimi_k3}}"
        )
    config.only(ONLY)
    config = config.renamed(ALIASES)
    if "linear_attn_config" in config:
        stated = config.section("linear_attn_config")
        names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
        names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        config = config.with_values({mine: stated[theirs] for theirs, mine in names.items() if theirs in stated})
    return config.with_defaults(DEFAULTS)


def _full(kinds: Sequence[str]) -> list[int]:
    return [index for index, kind in enumerate(kinds) if kind == FULL]


def _sizes(config: HfConfig) -> KimiDeltaSizes:
    return KimiDeltaSizes(
        num_heads=config.integer("linear_num_heads"),
        dim=config.integer("linear_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim", least=2),
    )


def _kinds(config: HfConfig) -> list[str]:
    """`layer_types`, the layers (from 1) that `linear_attn_config` lists, or every fourth but the first full."""
    stated, count = config.kinds("layer_types", (LINEAR, FULL)), config.integer("num_hidden_layers")
    if stated is not None:
        return stated
    if "linear_attn_config" not in config:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    full = full_layers(config)
    return [FULL if layer in full else LINEAR for layer in range(count)]


def _fused(sizes: KimiDeltaSizes) -> Fused:
    """One convolution where a checkpoint has joined the three."""
    width = sizes.num_heads * sizes.dim
    return {f"{BLOCK}.conv1d.weight": {f"{BLOCK}.{slot}_conv1d.weight": width for slot in ("q", "k", "v")}}
