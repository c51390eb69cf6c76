"""Ministral 3 (Mistral AI 2025): Mistral with YaRN and queries that grow with their position."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.heads import Temperature
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import max_position, rope_settings

__all__ = ["Ministral3Model"]

DEFAULTS = {
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
"""What transformers takes for keys that a config leaves out."""

NOT_OF_ROPE = ("llama_4_scaling_beta", "max_position_embeddings")
"""Stated among the rope keys."""


class Ministral3Model(CausalLm):
    model_types = ("ministral3",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        place = "rope_scaling" if "rope_scaling" in config else "rope_parameters"
        stated = config.section(place)
        own = {key: value for key, value in stated.items() if key not in NOT_OF_ROPE}
        with_rope = HfConfig({**config, place: own}, place=config.place)
        rope = rope_settings(with_rope)
        temperature = Temperature(stated.number("llama_4_scaling_beta"), rope.original_positions)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name, temperature),
            rules=PRE_NORM_RULES,
            ropes={"all": factory.rotary(rope, config.head_dim())},
            positions=max_position(with_rope),
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, temperature: Temperature) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            window=config.optional_integer("sliding_window"),
            steps=[temperature],
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
