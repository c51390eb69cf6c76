"""Granite 4 (IBM 2025): Mamba-2 layers between attention, an MLP or experts in each, Granite's constant factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES
from headrace.layers.experts import Experts, Routing, expert_act, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mamba import MambaSizes, mamba, mamba_fused, mamba_rules, time_limits
from headrace.layers.mlp import Mlp
from headrace.layers.port import Act
from headrace.layers.recurrent import RecurrentPreNormLayer, state_dtype
from headrace.layers.weights import Fused
from headrace.models.granite import GraniteLayer

__all__ = ["GraniteMoeHybridModel"]

MAMBA, FULL = "linear_attention", "full_attention"
OLD_NAMES = {"mamba": MAMBA, "attention": FULL}
BLOCK, SHARED = "model.layers.*.mamba", "model.layers.*.shared_mlp"
DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
"""What transformers takes for keys that a config leaves out."""


class GraniteStateLayer(RecurrentPreNormLayer):
    multiplier: float

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        act, residual = self.mlp_norm(self.mixer.output(mixed) * self.multiplier, residual)
        return self.mlp(act) * self.multiplier, residual


class GraniteMoeHybridModel(CausalLm):
    model_types = ("granitemoehybrid",)
    layer_kinds = frozenset({"full", "state"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        self.embedding_multiplier = config.number("embedding_multiplier")
        kinds = _kinds(config)
        has_rope = config.get("position_embedding_type") == "rope"
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kinds[index]),
            rules=_rules(config.integer("num_local_experts", least=0) > 0),
            ropes=None if has_rope else {},
            positions=config.integer("max_position_embeddings"),
            logit_scale=1 / config.positive("logits_scaling"),
            fused={**mamba_fused(BLOCK, _mamba_sizes(config)), **_fused_mlp(config)},
        )

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.embedding_multiplier


def _rules(has_experts: bool) -> Mapping[str, str]:
    mlp = "layers.*.mlp.shared" if has_experts else "layers.*.mlp"
    return {
        **PRE_NORM_RULES,
        **mamba_rules(BLOCK, "layers.*.mamba"),
        **expert_rules(
            "model.layers.*",
            "layers.*.mlp",
            router="block_sparse_moe.router.layer",
            experts="block_sparse_moe",
            fused=("input_linear.weight", "output_linear.weight"),
        ),
        f"{SHARED}.gate_proj.*": f"{mlp}.gate_up.*:gate",
        f"{SHARED}.up_proj.*": f"{mlp}.gate_up.*:up",
        f"{SHARED}.output_linear.*": f"{mlp}.down.*",
    }


def _fused_mlp(config: HfConfig) -> Fused:
    inner = config.integer("shared_intermediate_size")
    return {f"{SHARED}.input_linear.*": {f"{SHARED}.gate_proj.*": inner, f"{SHARED}.up_proj.*": inner}}


def _layer(config: HfConfig, factory: LayerFactory, name: str, kind: str) -> GraniteLayer | GraniteStateLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    input_norm = factory.norm(f"{name}.input_norm", hidden_size, eps=eps)
    mlp_norm = factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps)
    mlp = _mlp(config, factory, f"{name}.mlp")
    if kind == MAMBA:
        mixer = mamba(
            factory,
            f"{name}.mamba",
            hidden_size=hidden_size,
            sizes=_mamba_sizes(config),
            eps=eps,
            state_dtype=state_dtype(factory, config),
        )
        layer = GraniteStateLayer(input_norm=input_norm, mixer=mixer, mlp_norm=mlp_norm, mlp=mlp)
    else:
        has_bias = config.flag("attention_bias", False)
        attention = factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all" if config.get("position_embedding_type") == "rope" else None,
            scale=config.positive("attention_multiplier"),
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        layer = GraniteLayer(input_norm=input_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)
    layer.multiplier = config.number("residual_multiplier")
    return layer


def _mlp(config: HfConfig, factory: LayerFactory, name: str) -> Mlp | Experts:
    hidden_size, act = config.integer("hidden_size"), config.text("hidden_act", "silu")
    shared = config.integer("shared_intermediate_size")
    if not config.integer("num_local_experts", least=0):
        return factory.mlp(name, hidden_size=hidden_size, intermediate_size=shared, act=act)
    return factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        routing=Routing(
            num_experts=config.integer("num_local_experts"),
            top_k=config.integer("num_experts_per_tok"),
            scoring="softmax_top",
        ),
        act=expert_act(act),
        shared_size=shared,
        shared_act=act,
    )


def _mamba_sizes(config: HfConfig) -> MambaSizes:
    config.only({"hidden_act": "silu"})  # of the convolution too
    heads, wide = config.integer("mamba_n_heads"), config.integer("mamba_expand") * config.integer("hidden_size")
    dim = wide // heads if config["mamba_d_head"] == "auto" else config.integer("mamba_d_head")
    if dim * heads != wide:
        raise ValueError(f"{config.place}: {heads} Mamba heads of {dim} features are not mamba_expand * hidden_size")
    return MambaSizes(
        num_heads=heads,
        dim=dim,
        num_groups=config.integer("mamba_n_groups"),
        state=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv", least=2),
        time_limits=time_limits(config),
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
    ).checked(config.place)


def _kinds(config: HfConfig) -> list[str]:
    """`layer_types` (older: `layers_block_type`); all Mamba where there is none."""
    count = config.integer("num_hidden_layers")
    stated = config.words("layer_types") or config.words("layers_block_type") or [MAMBA] * count
    kinds = [OLD_NAMES.get(kind, kind) for kind in stated]
    if len(kinds) != count or set(kinds) - {MAMBA, FULL}:
        raise ValueError(f"{config.place}: layer_types must state mamba or attention for each of {count} layers")
    return kinds
