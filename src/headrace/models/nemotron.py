"""Nemotron 4 and Minitron (NVIDIA 2024): layer norms stored less one, an MLP of squared ReLU without a gate, rope on a
share of the features."""

from __future__ import annotations

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import COMMON_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.norm import Norm

__all__ = ["NemotronModel"]

DEFAULTS = {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "relu2"}
"""What transformers takes for keys that a config leaves out."""

RULES = {
    **{name: place for name, place in COMMON_RULES.items() if "norm" not in name and ".mlp." not in name},
    "model.layers.*.input_layernorm.*": "layers.*.input_norm.*",
    "model.layers.*.post_attention_layernorm.*": "layers.*.mlp_norm.*",
    "model.layers.*.mlp.up_proj.*": "layers.*.mlp.up.*:up",
    "model.layers.*.mlp.down_proj.*": "layers.*.mlp.down.*",
    "model.norm.*": "norm.*",
}


class NemotronModel(CausalLm):
    model_types = ("nemotron",)

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules=RULES,
            norm=_norm(config, factory, "norm"),
        )


def _norm(config: HfConfig, factory: LayerFactory, name: str) -> Norm:
    return factory.layer_norm(
        name, config.integer("hidden_size"), eps=config.number("norm_eps"), bias=True, plus_one=True
    )


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PreNormLayer:
    has_bias = config.flag("attention_bias", False)
    return PreNormLayer(
        input_norm=_norm(config, factory, f"{name}.input_norm"),
        attention=factory.attention(
            f"{name}.attention", **config.heads(), rope="all", qkv_bias=has_bias, out_bias=has_bias
        ),
        mlp_norm=_norm(config, factory, f"{name}.mlp_norm"),
        mlp=factory.plain_mlp(
            f"{name}.mlp",
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            act=config.text("hidden_act", "relu2"),
            bias=config.flag("mlp_bias", False),
        ),
    )
