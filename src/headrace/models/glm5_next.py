"""GLM-5.3-Flash (Zhipu AI 2026), its language model: three layers of Kimi Delta Attention to one of latent attention
over chosen pools of tokens, several residual streams, experts behind some dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.layers.causal import TEXT_PREFIXES, CausalLm, text_section
from headrace.layers.decoder import PRE_NORM_RULES
from headrace.layers.experts import ExpertAct, Experts, corrected_routing, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.hyper import HyperLayer, HyperRecurrentLayer, StreamSizes, hyper_connection, spread
from headrace.layers.indexer import SHARED, indexer_kinds
from headrace.layers.kimi_delta import KimiDeltaSizes, beside_delta, kimi_delta
from headrace.layers.latent import LatentAttention, LatentSizes, latent_attention
from headrace.layers.mlp import Mlp, is_dense
from headrace.layers.pooled import (
    POOL_INDEXER_RULES,
    EntryIndexSpec,
    PooledAttention,
    PoolSpec,
    no_features,
    pool_indexer,
)
from headrace.layers.port import Act, Layer, Rope
from headrace.layers.recurrent import state_dtype
from headrace.layers.rope import rope_settings

__all__ = ["Glm5NextModel"]

LINEAR, INDEXED = "linear_attention", "indexed_attention"
FULL = "full_attention"
"""The other name of `indexed_attention`."""
EVERY = 4
"""Where a config lists no kinds, every so many layers one attends."""
NUM_DENSE = 3
SAFE_BOUND = -5.0

DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 1_048_576,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 288,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "qk_nope_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "swiglu_limit": 10.0,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": SAFE_BOUND,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "index_kpool": 16,
    "index_kpool_always_select_tail": True,
}
"""What transformers takes for keys that a config leaves out."""

ONLY: Mapping[str, Any] = {"hidden_act": "silu", "index_kpool_compress": True, "mla_use_nope": True}
"""Keys with the one value that is known; the last two are of published configs alone."""

STREAM_RULES = {
    f"model.layers.*.hc_{block}_{part}": f"layers.*.hyper_{block}.{part}"
    for block in ("attn", "ffn")
    for part in ("fn", "base", "scale")
}
RULES: Mapping[str, str] = {
    **{name: place for name, place in PRE_NORM_RULES.items() if ".self_attn." not in name},
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
    **STREAM_RULES,
}


class Glm5NextModel(CausalLm):
    """Images and videos of multimodal checkpoints are not read."""

    model_types = ("glm5_next_text", "glm5_next")
    layer_kinds = frozenset({"pooled", "latent", "state"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = _unified(config)
        config.only(ONLY)
        kinds = config.kinds("layer_types", (LINEAR, INDEXED))
        assert kinds is not None
        attending = [index for index, kind in enumerate(kinds) if kind == INDEXED]
        choosers = indexer_kinds(config, first=attending[0]) if attending else []
        num_layers, drafting = len(kinds), config.integer("num_nextn_predict_layers", 1, least=0)
        self.num_streams = config.integer("hc_mult")
        latent_rules = {**LatentSizes.of(config).rules, **POOL_INDEXER_RULES}
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(
                config, factory, name, index,
                is_linear=kinds[index] == LINEAR, has_indexer=index in attending and choosers[index] != SHARED,
            ),
            rules={**RULES, **beside_delta(latent_rules, attending)},
            ropes={},
            positions=config.integer("max_position_embeddings"),
            ignored=("model.visual.**", "visual.**"),
            kept=[f"model.layers.{num_layers + index}.**" for index in range(drafting)],
            renamed=TEXT_PREFIXES,
        )  # fmt: skip

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        """Nothing is turned: the layers between know where a token is."""
        return {"all": no_features(positions)}

    def embed(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, streams, hidden]"""
        return spread(super().embed(ids), self.num_streams)

    def final(self, partial: Tensor | None, residual: Tensor) -> Act:
        return super().final(partial, residual.mean(1))


def _layer(
    config: HfConfig, factory: LayerFactory, name: str, index: int, *, is_linear: bool, has_indexer: bool
) -> Layer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    streams = StreamSizes.of(config, norm_eps=eps)
    parts: dict[str, Any] = {
        "before_mix": hyper_connection(factory, f"{name}.hyper_attn", streams),
        "input_norm": factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        "before_mlp": hyper_connection(factory, f"{name}.hyper_ffn", streams),
        "mlp_norm": factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        "mlp": _mlp(config, factory, f"{name}.mlp", index),
        "parallel": factory.parallel,
    }
    if not is_linear:
        return HyperLayer(_attention(config, factory, f"{name}.attention", has_indexer=has_indexer), **parts)
    mixer = kimi_delta(
        factory,
        f"{name}.delta",
        hidden_size=hidden_size,
        sizes=_delta_sizes(config),
        eps=eps,
        state_dtype=state_dtype(factory, config),
    )
    return HyperRecurrentLayer(mixer, **parts)


def _attention(
    config: HfConfig, factory: LayerFactory, name: str, *, has_indexer: bool
) -> PooledAttention | LatentAttention:
    hidden_size, index = config.integer("hidden_size"), _index(config)
    indexer = None
    if has_indexer:
        q_rank = config.integer("q_lora_rank")
        indexer = pool_indexer(factory, f"{name}.indexer", hidden_size=hidden_size, q_rank=q_rank, spec=index)
    latent = latent_attention(
        factory,
        name,
        hidden_size=hidden_size,
        sizes=LatentSizes.of(config),
        settings=rope_settings(config),
        eps=config.number("rms_norm_eps"),
        bias=config.flag("attention_bias", False),
        interleaved=True,
        indexer=indexer,
        is_sparse=True,
    )
    return latent if indexer is None else PooledAttention(latent, index)


def _index(config: HfConfig) -> EntryIndexSpec:
    every, top = config.integer("index_kpool", least=2), config.integer("index_topk")
    if top % every:
        raise ValueError(f"{config.place}: index_kpool {every} does not divide index_topk {top}")
    if not config.flag("index_kpool_always_select_tail", True):
        raise ValueError(
            f"{config.place}: index_kpool_always_select_tail false is not served: a query before the first whole pool"
            " would see nothing"
        )
    pool = PoolSpec(config.integer("index_head_dim"), every, overlaps=False)
    return EntryIndexSpec(config.integer("index_n_heads"), pool, top // every)


def _delta_sizes(config: HfConfig) -> KimiDeltaSizes:
    return KimiDeltaSizes(
        num_heads=config.integer("linear_num_heads"),
        dim=config.integer("linear_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim", least=2),
        lower_bound=config.optional_negative("linear_lower_bound"),
        is_decay_flat=True,
    )


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    hidden_size, act = config.integer("hidden_size"), ExpertAct(limit=config.positive("swiglu_limit"))
    if is_dense(config, index, first=NUM_DENSE):
        return factory.mlp(
            name, hidden_size=hidden_size, intermediate_size=config.integer("intermediate_size"), act=act
        )
    inner = config.integer("moe_intermediate_size")
    return factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=inner,
        routing=corrected_routing(config, config.integer("n_routed_experts")),
        act=act,
        router_dtype=torch.float32,
        has_correction=True,
        shared_size=inner * config.integer("n_shared_experts"),
        shared_act=act,
    )


def _unified(config: HfConfig) -> HfConfig:
    """Flat configs and those of multimodal checkpoints, older and newer keys, under one set."""
    if "text_config" in config:
        config = text_section(config)
    stated: dict[str, Any] = {}
    if "linear_attn_config" in config:
        published = config.section("linear_attn_config")
        names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
        names |= {"short_conv_kernel_size": "linear_conv_kernel_dim", "gate_lower_bound": "linear_lower_bound"}
        stated = {mine: published[theirs] for theirs, mine in names.items() if theirs in published}
        if published.flag("safe_gate", True):
            stated.setdefault("linear_lower_bound", SAFE_BOUND)
    config = HfConfig({**config.with_defaults(DEFAULTS), **stated}, place=config.place)
    listed, count = config.get("layer_types"), config.integer("num_hidden_layers")
    if isinstance(listed, list):
        kinds = [INDEXED if kind == FULL else kind for kind in listed]
    else:
        kinds = [LINEAR if (layer + 1) % EVERY else INDEXED for layer in range(count)]
    if config["qk_rope_head_dim"] != 0:
        raise ValueError(f"{config.place}: qk_rope_head_dim must be 0, not {config['qk_rope_head_dim']!r}")
    return HfConfig({**config, "layer_types": kinds}, place=config.place)
