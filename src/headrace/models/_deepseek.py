"""What DeepSeek's architectures and their followers share: latent attention, experts behind some dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.experts import Experts, Routing, corrected_routing, expert_act, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.indexer import INDEXER_RULES, Indexer, IndexSpec, indexer
from headrace.layers.latent import LatentSizes, latent_attention
from headrace.layers.mlp import Mlp, is_dense
from headrace.layers.rope import rope_settings

V3_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 4096,
    "num_attention_heads": 128,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
"""What transformers takes for keys that a V3 config leaves out."""


class LatentDecoder(CausalLm):
    """A V3. Those that differ say how in `defaults`, `routing` and `indexer`."""

    layer_kinds = frozenset({"latent"})
    has_experts = True
    defaults: ClassVar[Mapping[str, Any]] = V3_DEFAULTS
    has_correction: ClassVar[bool] = True
    """Experts' scores are corrected when they are chosen."""
    is_sparse: ClassVar[bool] = False
    """Queries see the tokens that an indexer chose."""

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(self.defaults)
        plain = {name: place for name, place in PRE_NORM_RULES.items() if ".self_attn." not in name}
        experts = expert_rules("model.layers.*.mlp", "layers.*.mlp")
        num_layers = config.integer("num_hidden_layers")
        drafting = config.integer("num_nextn_predict_layers", 1, least=0)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: self._layer(config, factory, name, index),
            rules={**plain, **experts, **LatentSizes.of(config).rules, **INDEXER_RULES},
            ropes={"all": factory.rotary(rope_settings(config), config.integer("qk_rope_head_dim"))},
            kept=[f"model.layers.{num_layers + index}.**" for index in range(drafting)],
        )

    @staticmethod
    def routing(config: HfConfig) -> Routing:
        return corrected_routing(config, config.integer("n_routed_experts"))

    @staticmethod
    def indexer(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Indexer | None:
        """Of one layer; None where it takes an earlier one's choice, or sees everything."""
        return None

    def _layer(self, config: HfConfig, factory: LayerFactory, name: str, index: int) -> PreNormLayer:
        hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
        return PreNormLayer(
            input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
            attention=latent_attention(
                factory,
                f"{name}.attention",
                hidden_size=hidden_size,
                sizes=LatentSizes.of(config),
                settings=rope_settings(config),
                bias=config.flag("attention_bias", False),
                interleaved=config.flag("rope_interleave", True),
                indexer=self.indexer(config, factory, f"{name}.attention.indexer", index),
                is_sparse=self.is_sparse,
            ),
            mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
            mlp=self._mlp(config, factory, f"{name}.mlp", index),
        )

    def _mlp(self, config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
        hidden_size, act = config.integer("hidden_size"), config.text("hidden_act", "silu")
        if is_dense(config, index, first=config.integer("first_k_dense_replace", least=0)):
            inner, has_bias = config.integer("intermediate_size"), config.flag("mlp_bias", False)
            return factory.mlp(name, hidden_size=hidden_size, intermediate_size=inner, act=act, bias=has_bias)
        inner = config.integer("moe_intermediate_size")
        return factory.experts(
            name,
            hidden_size=hidden_size,
            intermediate_size=inner,
            routing=self.routing(config),
            act=expert_act(act),
            router_dtype=torch.float32,
            has_correction=self.has_correction,
            shared_size=inner * config.integer("n_shared_experts"),
            shared_act=act,
        )


def stated_indexer(config: HfConfig, factory: LayerFactory, name: str, *, interleaved: bool) -> Indexer:
    """From the usual keys.

    Args:
        interleaved: its rope turns neighbouring features, where the config doesn't say (`indexer_rope_interleave`).
    """
    return indexer(
        factory,
        name,
        hidden_size=config.integer("hidden_size"),
        q_rank=config.integer("q_lora_rank"),
        spec=IndexSpec(
            num_heads=config.integer("index_n_heads"),
            dim=config.integer("index_head_dim"),
            top=config.integer("index_topk"),
        ),
        interleaved=config.flag("indexer_rope_interleave", interleaved),
    )
