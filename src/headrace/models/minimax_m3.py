"""MiniMax-M3 (MiniMax 2026), its language model: queries of most layers see chosen blocks; clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.layers.block_sparse import BLOCK_INDEX_RULES, BlockIndexSpec, SparseAttention, block_indexer
from headrace.layers.causal import TEXT_PREFIXES, CausalLm, fused_mlp_names
from headrace.layers.decoder import PRE_NORM_RULES, QK_NORM_RULES, PreNormLayer
from headrace.layers.experts import ExpertAct, Experts, Routing, expert_rules, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.rope import rope_settings

__all__ = ["MiniMaxM3Model"]

DEFAULTS = {
    "max_position_embeddings": 524_288,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12_288,
    "shared_intermediate_size": 3072,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
    "index_init_blocks": 0,
}
"""What transformers takes for keys that a config leaves out."""

THETA = 5_000_000.0
FULL, SPARSE = "full_attention", "minimax_m3_sparse"
PUBLISHED = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
    "sparse_init_block": "index_init_blocks",
}
"""Keys of `sparse_attention_config` as published -> those of transformers, which has none for the last."""
ONLY: Mapping[str, Any] = {
    "attention_output_gate": False,
    "qk_norm_type": "per_head",
    "scoring_func": "sigmoid",
    "use_gemma_norm": True,
    "use_qk_norm": True,
}
ONLY_SPARSE: Mapping[str, Any] = {"sparse_score_type": "max", "use_sparse_attention": True}
"""Published keys with the one value that is known; the latter of `sparse_attention_config`."""
BY_LAYER = frozenset({"sparse_attention_freq", "sparse_disable_index_value"})

RULES = {
    **PRE_NORM_RULES,
    **QK_NORM_RULES,
    **BLOCK_INDEX_RULES,
    **expert_rules("model.layers.*.block_sparse_moe", "layers.*.mlp", names=("w1", "w3", "w2")),
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
}
"""The published names, and those that transformers has."""


class MiniMaxM3Model(CausalLm):
    """The text model, also of multimodal checkpoints; images are not read."""

    model_types = ("minimax_m3_vl_text", "minimax_m3_vl")
    layer_kinds = frozenset({"full", "sparse"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = _text(config)
        dense, shared = config.integer("dense_intermediate_size"), config.integer("shared_intermediate_size")
        eps = config.number("rms_norm_eps", 1e-6)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, index),
            rules=RULES,
            norm=factory.norm("norm", config.integer("hidden_size"), eps=eps, plus_one=True),
            ropes={"all": factory.rotary(rope_settings(config, default_theta=THETA), config.head_dim())},
            ignored=("vision_tower.**", "multi_modal_projector.**", "patch_merge_mlp.**"),
            kept=("mtp.**", "model.mtp.**"),
            renamed={
                **TEXT_PREFIXES,
                "model.vision_tower.": "vision_tower.",
                "model.multi_modal_projector.": "multi_modal_projector.",
            },
            fused={
                **fused_mlp_names(dense),
                **fused_mlp_names(shared, "model.layers.*.mlp.shared_experts"),
            },
        )


def _text(config: HfConfig) -> HfConfig:
    """The language model's keys under their newer names."""
    if "text_config" in config:
        config = config.section("text_config")
    config.only(ONLY)
    published = _sparse_keys(config)
    stated = {name: published[key] for key, name in PUBLISHED.items() if key in published}
    for key, name, kinds in (
        ("sparse_attention_freq", "layer_types", (FULL, SPARSE)),
        ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
    ):
        every = (published if name == "layer_types" else config).get(key)
        if isinstance(every, list):
            stated[name] = [kinds[bool(flag)] for flag in every]
    if "rotary_dim" in config:
        stated["partial_rotary_factor"] = config.integer("rotary_dim") / config.integer("head_dim", 128)
    return config.with_defaults(stated).with_defaults(DEFAULTS)


def _sparse_keys(config: HfConfig) -> HfConfig:
    """`sparse_attention_config`, once nothing in it asks for what isn't known here."""
    if "sparse_attention_config" not in config:
        return HfConfig({}, place=config.place)
    stated = config.section("sparse_attention_config")
    stated.only(ONLY_SPARSE)
    strange = sorted(set(stated) - set(PUBLISHED) - set(ONLY_SPARSE) - BY_LAYER)
    if strange:
        raise ValueError(f"{stated.place}: {', '.join(strange)}: not known of MiniMax-M3: such a model isn't served")
    chosen, disabled = stated.get("sparse_attention_freq", []), stated.get("sparse_disable_index_value")
    if disabled is not None and any(on and not off for on, off in zip(chosen, disabled)):
        raise ValueError(f"{stated.place}: sparse_disable_index_value must be 1 in each sparse layer: no index values")
    return stated


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    heads, kv_heads, head_dim = config.integer("num_attention_heads"), config.num_kv_heads(), config.head_dim()
    attention = factory.attention(
        f"{name}.attention",
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope="all",
        q_norm=factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps, plus_one=True),
        k_norm=factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps, plus_one=True),
    )
    input_norm = factory.norm(f"{name}.input_norm", hidden_size, eps=eps, plus_one=True)
    mlp_norm = factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps, plus_one=True)
    mlp = _mlp(config, factory, f"{name}.mlp", index)
    kinds = config.kinds("layer_types", (FULL, SPARSE))
    if kinds is None or kinds[index] == FULL:
        return PreNormLayer(input_norm=input_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)
    indexer = block_indexer(
        factory, f"{name}.attention.index",
        hidden_size=hidden_size, num_heads=heads, num_kv_heads=kv_heads, spec=_index(config), eps=eps,
    )  # fmt: skip
    sparse = SparseAttention(attention, indexer)
    return PreNormLayer(input_norm=input_norm, attention=sparse, mlp_norm=mlp_norm, mlp=mlp)


def _index(config: HfConfig) -> BlockIndexSpec:
    count, dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    if count != config.num_kv_heads():
        raise ValueError(
            f"{config.place}: index_n_heads {count} must be num_key_value_heads {config.num_kv_heads()}: each KV head"
            " has an index head of its own"
        )
    turned = int(rope_settings(config, default_theta=THETA).rotary_share * config.head_dim())
    if dim < turned:
        raise ValueError(f"{config.place}: index_head_dim {dim} is less than the {turned} features that rope turns")
    top = config.integer("index_topk_blocks")
    local, first = config.integer("index_local_blocks", least=0), config.integer("index_init_blocks", least=0)
    if local + first > top:
        raise ValueError(
            f"{config.place}: {local} local and {first} initial blocks are more than the {top} of index_topk_blocks"
        )
    return BlockIndexSpec(dim=dim, block=config.integer("index_block_size"), top=top, local=local, first=first)


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    hidden_size = config.integer("hidden_size")
    act = ExpertAct(limit=config.number("swiglu_limit"), alpha=config.number("swiglu_alpha"), up_offset=1.0)
    kinds = config.kinds("mlp_layer_types", ("dense", "sparse"))
    if kinds is not None and kinds[index] == "dense":
        inner = config.integer("dense_intermediate_size")
        return factory.mlp(name, hidden_size=hidden_size, intermediate_size=inner, act=act)
    return factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        routing=Routing(
            num_experts=num_experts(config, 128),
            top_k=config.integer("num_experts_per_tok"),
            scoring="sigmoid",
            normalise=True,
            scaling=config.number("routed_scaling_factor"),
        ),
        act=act,
        has_correction=True,
        shared_size=config.integer("shared_intermediate_size"),
        shared_act=act,
    )
