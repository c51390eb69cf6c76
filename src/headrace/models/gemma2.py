"""Gemma 2 (Gemma team 2024): norms around each block, a window in every other layer, caps on scores and logits."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.layers.blocks import SandwichLayer
from headrace.layers.causal import CausalLm
from headrace.layers.decoder import SANDWICH_RULES
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.norm import Norm
from headrace.layers.window import SLIDING, layer_kinds

__all__ = ["Gemma2Model"]

DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}
"""What transformers takes for keys that a config leaves out."""


class Gemma2Model(CausalLm):
    model_types = ("gemma2",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        config.only({"use_bidirectional_attention": False})
        hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
        kinds = layer_kinds(config, sliding_pattern=2)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kind=kinds[index]),
            rules=SANDWICH_RULES,
            norm=factory.norm("norm", hidden_size, eps=eps, plus_one=True),
            soft_cap=config.optional_number("final_logit_softcapping"),
        )
        # In the dtype of the weights, as the model was trained.
        self.embedding_scale = torch.tensor(hidden_size**0.5, dtype=factory.dtype, device=factory.device)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.embedding_scale


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, kind: str) -> SandwichLayer:
    has_bias = config.flag("attention_bias", False)

    def norm(part: str) -> Norm:
        eps = config.number("rms_norm_eps", 1e-6)
        return factory.norm(f"{name}.{part}", config.integer("hidden_size"), eps=eps, plus_one=True)

    return SandwichLayer(
        input_norm=norm("input_norm"),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            scale=config.positive("query_pre_attn_scalar") ** -0.5,
            window=config.integer("sliding_window") if kind == SLIDING else None,
            soft_cap=config.optional_number("attn_logit_softcapping"),
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        attention_post_norm=norm("attention_post_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=factory.mlp(
            f"{name}.mlp",
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            act=config.text("hidden_activation", "gelu_pytorch_tanh"),
        ),
        mlp_post_norm=norm("mlp_post_norm"),
    )
