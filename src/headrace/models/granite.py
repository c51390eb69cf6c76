"""Granite 3 (IBM 2024): Llama with constant factors on embedding, scores, each block's output and logits."""

from __future__ import annotations

from torch import Tensor

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.port import Act

__all__ = ["GraniteModel"]

DEFAULTS = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
"""What transformers takes for keys that a config leaves out."""


class GraniteLayer(PreNormLayer):
    multiplier: float

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        act, residual = self.mlp_norm(self.attention.output(mixed) * self.multiplier, residual)
        return self.mlp(act) * self.multiplier, residual


class GraniteModel(CausalLm):
    model_types = ("granite",)

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules=PRE_NORM_RULES,
            logit_scale=1 / config.positive("logits_scaling"),
        )
        self.embedding_multiplier = config.number("embedding_multiplier")

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.embedding_multiplier


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> GraniteLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    has_bias = config.flag("attention_bias", False)
    layer = GraniteLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            scale=config.positive("attention_multiplier"),
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
    layer.multiplier = config.number("residual_multiplier")
    return layer
