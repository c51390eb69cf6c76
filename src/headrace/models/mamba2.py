"""Mamba-2 (Dao and Gu 2024): state-space layers alone, in transformers' form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.layers.causal import CausalLm
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mamba import MambaSizes, mamba, mamba_fused, mamba_rules, time_limits
from headrace.layers.recurrent import state_dtype
from headrace.layers.single import StateLayer

__all__ = ["Mamba2Model"]

BLOCK, PART = "model.layers.*.mixer", "layers.*.mamba"
RULES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.*.norm.weight": "layers.*.norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    **mamba_rules(BLOCK, PART),
}
RENAMED = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
}
DEFAULTS: Mapping[str, Any] = {
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 1_048_576,
}
"""What transformers takes for keys that a config leaves out; it knows no last position, this is one for the engine."""


class Mamba2Model(CausalLm):
    """The residual stays in the model's dtype, whatever `residual_in_fp32` says."""

    model_types = ("mamba2",)
    layer_kinds = frozenset({"state"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        hidden_size, eps = config.integer("hidden_size"), config.number("layer_norm_epsilon")
        sizes = mamba_sizes(config)

        def layer(name: str, _: int) -> StateLayer:
            mixer = mamba(
                factory,
                f"{name}.mamba",
                hidden_size=hidden_size,
                sizes=sizes,
                eps=eps,
                state_dtype=state_dtype(factory, config),
            )
            return StateLayer(norm=factory.norm(f"{name}.norm", hidden_size, eps=eps), mixer=mixer)

        super().__init__(
            config,
            factory,
            layer=layer,
            rules=RULES,
            norm=factory.norm("norm", hidden_size, eps=eps),
            ropes={},
            positions=config.integer("max_position_embeddings"),
            fused=mamba_fused(BLOCK, sizes),
            renamed=RENAMED,
        )


def mamba_sizes(config: HfConfig) -> MambaSizes:
    config.only({"hidden_act": "silu"})
    return MambaSizes(
        num_heads=config.integer("num_heads"),
        dim=config.integer("head_dim"),
        num_groups=config.integer("n_groups"),
        state=config.integer("state_size"),
        kernel=config.integer("conv_kernel", least=2),
        time_limits=time_limits(config),
        has_conv_bias=config.flag("use_conv_bias", True),
        has_bias=config.flag("use_bias", False),
    ).checked(config.place)
