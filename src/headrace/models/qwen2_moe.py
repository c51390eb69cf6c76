"""Qwen2 with a mixture of experts (Yang et al. 2024): biases on q, k and v, and a shared expert behind a gate."""

from __future__ import annotations

from headrace.layers.decoder import PRE_NORM_RULES, ROTARY_NAMES, Decoder, PreNormLayer
from headrace.layers.experts import Experts, Routing, expert_act, expert_rules, is_sparse, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.rope import max_position, rope_settings
from headrace.layers.weights import WeightMap
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["Qwen2MoeModel"]

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
"""What transformers takes for keys that a config leaves out."""

RULES = {**PRE_NORM_RULES, **expert_rules("model.layers.*.mlp", "layers.*.mlp", shared="shared_expert")}


class Qwen2MoeModel(Decoder):
    """Pre-norm decoder; some layers may have a dense MLP, some may use a sliding window."""

    model_types = ("qwen2_moe",)
    layer_kinds = frozenset({"full", "window"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        is_tied = config.flag("tie_word_embeddings", False)
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        super().__init__(
            embedding=embedding,
            layers=[_layer(config, factory, index, window) for index, window in enumerate(_windows(config))],
            norm=factory.norm("norm", hidden_size, eps=config.number("rms_norm_eps", 1e-6)),
            head=factory.head("head", vocab_size, hidden_size, tied_to=embedding if is_tied else None),
            ropes={"all": factory.rotary(rope_settings(config), config.head_dim())},
            max_position=max_position(config),
        )
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        self._weights = factory.weight_map(RULES, ignored=ROTARY_NAMES, tied=tied)

    def weight_map(self) -> WeightMap:
        return self._weights


def _windows(config: HfConfig) -> list[int | None]:
    """Where layers aren't listed, every other one of the first `max_window_layers` slides: unlike in dense Qwen2."""
    num_layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return [None] * num_layers
    last = config.integer("max_window_layers", least=0)
    kinds = [SLIDING if (index + 1) % 2 and index < last else FULL for index in range(num_layers)]
    if "layer_types" in config:
        kinds = layer_kinds(config)
    return [config.optional_integer("sliding_window") if kind == SLIDING else None for kind in kinds]


def _layer(config: HfConfig, factory: LayerFactory, index: int, window: int | None) -> PreNormLayer:
    name, hidden_size, eps = f"layers.{index}", config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=config.integer("num_attention_heads"),
            num_kv_heads=config.num_kv_heads(),
            head_dim=config.head_dim(),
            rope="all",
            window=window,
            qkv_bias=config.flag("qkv_bias", True),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=_mlp(config, factory, f"{name}.mlp", index),
    )


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    hidden_size, act = config.integer("hidden_size"), config.text("hidden_act", "silu")
    if not is_sparse(config, index):
        return factory.mlp(
            name, hidden_size=hidden_size, intermediate_size=config.integer("intermediate_size"), act=act
        )
    return factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=Routing(
            num_experts=num_experts(config, 60),
            top_k=config.integer("num_experts_per_tok"),
            normalise=config.flag("norm_topk_prob", False),
        ),
        act=expert_act(act),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_act=act,
        has_shared_gate=True,
    )
