"""DeepSeek-V4 (DeepSeek-AI 2026): attention over a window and compressed tokens, several residual streams, and experts
of which the first layers' are chosen by token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.layers.causal import CausalLm
from headrace.layers.compressed import (
    ENTRY_ROPE,
    WINDOW_ROPE,
    CompressedSizes,
    EntryIndexSpec,
    PoolSpec,
    compressed_attention,
    first_of_entry,
)
from headrace.layers.experts import ExpertAct, Experts, Routing, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hashed_experts import HashedExperts, hashed_experts
from headrace.layers.hf_config import HfConfig
from headrace.layers.hyper import HyperLayer, StreamSizes, hyper_connection, hyper_head, spread
from headrace.layers.port import Act, Rope
from headrace.layers.rope import RopeSettings, rope_settings

__all__ = ["DeepseekV4Model"]

SLIDING, LIGHT, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, ROUTED = "hash_moe", "moe"
SCORINGS = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
RATIOS = {0: SLIDING, 4: LIGHT, 128: HEAVY}
"""`compress_ratios` of published configs -> kinds of layers."""

DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 1_048_576,
    "moe_intermediate_size": 2048,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}
"""What transformers takes for keys that a config leaves out."""
DEFAULT_RATES = {LIGHT: 4, HEAVY: 128}
DEFAULT_NUM_HASHED = 3


def _of_scale(place: str) -> str:
    """`a.*:slot` -> where the scales of that weight go"""
    parameter, colon, slot = place.partition(":")
    return f"{parameter.removesuffix('.*')}.weight_scale_inv{colon}{slot}"


LAYER = "layers.*"
ATTENTION, PART = f"{LAYER}.attn", f"{LAYER}.attention"
SHARED, SHARED_PART = f"{LAYER}.ffn.shared_experts", f"{LAYER}.mlp.shared"
PLAIN_RULES: Mapping[str, str] = {
    **expert_rules(f"{LAYER}.ffn", f"{LAYER}.mlp", names=("w1", "w3", "w2")),
    f"{LAYER}.ffn.gate.bias": f"{LAYER}.mlp.router.correction",
    f"{LAYER}.ffn.gate.tid2eid": f"{LAYER}.mlp.table.experts",
    f"{SHARED}.w1.*": f"{SHARED_PART}.gate_up.*:gate",
    f"{SHARED}.w3.*": f"{SHARED_PART}.gate_up.*:up",
    f"{SHARED}.w2.*": f"{SHARED_PART}.down.*",
    f"{ATTENTION}.wq_a.*": f"{PART}.down.*:q",
    f"{ATTENTION}.wkv.*": f"{PART}.down.*:key",
    f"{ATTENTION}.q_norm.weight": f"{PART}.q_norm.weight",
    f"{ATTENTION}.wq_b.*": f"{PART}.q.*",
    f"{ATTENTION}.norm.weight": f"{PART}.key_norm.weight",
    f"{ATTENTION}.kv_norm.weight": f"{PART}.key_norm.weight",
    f"{ATTENTION}.attn_sink": f"{PART}.sinks.weight",
    f"{ATTENTION}.wo_a.*": f"{PART}.out_groups.*",
    f"{ATTENTION}.wo_b.*": f"{PART}.out.*",
    f"{ATTENTION}.indexer.wq_b.*": f"{PART}.indexer.q.*",
    f"{ATTENTION}.indexer.weights_proj.*": f"{PART}.indexer.weights.*",
    **{
        f"{ATTENTION}.{stored}.{published}": f"{PART}.{part}.{ours}"
        for stored, part in (("compressor", "compressor"), ("indexer.compressor", "indexer"))
        for published, ours in (
            ("wkv.*", "loose.*:values"),
            ("wgate.*", "loose.*:gates"),
            ("ape", "bias"),
            ("norm.weight", "norm"),
        )
    },
    f"{LAYER}.attn_norm.weight": f"{LAYER}.input_norm.weight",
    f"{LAYER}.ffn_norm.weight": f"{LAYER}.mlp_norm.weight",
    **{f"{LAYER}.hc_{block}_{part}": f"{LAYER}.hyper_{block}.{part}" for block in ("attn", "ffn")
       for part in ("fn", "base", "scale")},
    **{f"hc_head_{part}": f"hyper_head.{part}" for part in ("fn", "base", "scale")},
    **{f"hc_head.hc_{part}": f"hyper_head.{part}" for part in ("fn", "base", "scale")},
    "embed.weight": "embed.weight",
    "embed_tokens.weight": "embed.weight",
    "norm.weight": "norm.weight",
    "head.weight": "head.weight",
    "lm_head.weight": "head.weight",
}  # fmt: skip
"""The published names, which transformers writes too, most of them behind `model.`."""
EXPERTS = f"{LAYER}.ffn.experts.*"
RULES: Mapping[str, str] = {
    **{  # scales have a name of their own
        f"{name.removesuffix('.*')}.scale": _of_scale(place) for name, place in PLAIN_RULES.items() if name[-2:] == ".*"
    },
    f"{EXPERTS}.w1.scale": f"{LAYER}.mlp.gate_up.weight_scale_inv:*.gate",
    f"{EXPERTS}.w3.scale": f"{LAYER}.mlp.gate_up.weight_scale_inv:*.up",
    f"{EXPERTS}.w2.scale": f"{LAYER}.mlp.down.weight_scale_inv:*",
    **PLAIN_RULES,
}


class DeepseekV4Model(CausalLm):
    model_types = ("deepseek_v4",)
    layer_kinds = frozenset({"compressed"})
    has_experts = True
    reads_mxfp4 = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = _unified(config)
        config.only({"hidden_act": "silu"})
        plan = _plan(config)
        streams = StreamSizes.of(config, norm_eps=1e-6)
        self.num_streams = streams.num_streams
        self.rates = sorted({pool.every for pool in plan.pools.values()})
        head_dim = config.head_dim()
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, index, plan),
            rules=RULES,
            ropes={
                WINDOW_ROPE: factory.rotary(_rope(config, "main"), head_dim),
                ENTRY_ROPE: factory.rotary(_rope(config, "compress"), head_dim),
            },
            positions=config.integer("max_position_embeddings"),
            renamed={"model.": ""},
            kept=("mtp.**",),
        )
        self.hyper_head = hyper_head(factory, "hyper_head", streams)
        self._weights = factory.weight_map()

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        entries = self.rotaries[ENTRY_ROPE]
        first = {first_of_entry(every): entries(positions // every * every) for every in self.rates}
        return {**super().ropes(positions), **first}

    def embed(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, streams, hidden]"""
        return spread(super().embed(ids), self.num_streams)

    def final(self, partial: Tensor | None, residual: Tensor) -> Act:
        return super().final(partial, self.hyper_head(residual))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Kinds by layer, and how those that compress do it."""

    layers: list[str]
    mlps: list[str]
    pools: Mapping[str, PoolSpec]


def _plan(config: HfConfig) -> _Plan:
    layers = config.kinds("layer_types", (SLIDING, LIGHT, HEAVY))
    mlps = config.kinds("mlp_layer_types", (HASHED, ROUTED))
    assert layers is not None and mlps is not None
    dim, rates = config.head_dim(), config.section("compress_rates")
    pools = {
        kind: PoolSpec(dim, rates.integer(kind, least=2), kind == LIGHT)
        for kind in (LIGHT, HEAVY) if kind in layers
    }  # fmt: skip
    return _Plan(layers, mlps, pools)


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int, plan: _Plan) -> HyperLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    pool = plan.pools.get(plan.layers[index])
    streams = StreamSizes.of(config, norm_eps=1e-6)
    return HyperLayer(
        compressed_attention(
            factory,
            f"{name}.attention",
            _sizes(config, eps),
            pool=pool,
            index=_index(config, pool) if plan.layers[index] == LIGHT and pool is not None else None,
        ),
        before_mix=hyper_connection(factory, f"{name}.hyper_attn", streams),
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        before_mlp=hyper_connection(factory, f"{name}.hyper_ffn", streams),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=_mlp(config, factory, f"{name}.mlp", is_hashed=plan.mlps[index] == HASHED),
        parallel=factory.parallel,
    )


def _index(config: HfConfig, pool: PoolSpec) -> EntryIndexSpec:
    own = PoolSpec(config.integer("index_head_dim"), pool.every, overlaps=True)
    return EntryIndexSpec(config.integer("index_n_heads"), own, config.integer("index_topk"))


def _mlp(config: HfConfig, factory: LayerFactory, name: str, *, is_hashed: bool) -> Experts | HashedExperts:
    scoring = config.text("scoring_func", "sqrtsoftplus")
    if scoring not in SCORINGS:
        raise ValueError(f"{config.place}: scoring_func {scoring!r} is not known: known are {', '.join(SCORINGS)}")
    inner, act = config.integer("moe_intermediate_size"), ExpertAct(limit=config.positive("swiglu_limit"))
    experts = factory.experts(
        name,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=inner,
        routing=Routing(
            num_experts=config.integer("n_routed_experts"),
            top_k=config.integer("num_experts_per_tok"),
            scoring="sigmoid" if scoring == "sigmoid" else "sqrt_softplus",
            normalise=True,
            scaling=config.number("routed_scaling_factor"),
        ),
        act=act,
        router_dtype=torch.float32,
        has_correction=not is_hashed,
        shared_size=inner,
        shared_act=act,
    )
    return hashed_experts(factory, name, experts, vocab_size=config.integer("vocab_size")) if is_hashed else experts


def _sizes(config: HfConfig, eps: float) -> CompressedSizes:
    heads, groups = config.integer("num_attention_heads"), config.integer("o_groups")
    if heads % groups:
        raise ValueError(f"{config.place}: o_groups {groups} does not divide num_attention_heads {heads}")
    if config.integer("num_key_value_heads", 1) != 1:
        raise ValueError(f"{config.place}: num_key_value_heads must be 1, not {config['num_key_value_heads']}")
    return CompressedSizes(
        hidden_size=config.integer("hidden_size"),
        num_heads=heads,
        dim=config.head_dim(),
        q_rank=config.integer("q_lora_rank"),
        window=config.integer("sliding_window"),
        num_groups=groups,
        out_rank=config.integer("o_lora_rank"),
        eps=eps,
    )


def _rope(config: HfConfig, kind: str) -> RopeSettings:
    """`main` is plain; `compress` has another base, and the config's scaling without a factor for the scores."""
    place = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.section(place) if config.get(place) else {}
    if isinstance(stated.get("main"), Mapping) and isinstance(stated.get("compress"), Mapping):
        return rope_settings(HfConfig({**config, "rope_scaling": None, "rope_parameters": stated}), layer_type=kind)
    share = config.get("partial_rotary_factor") or config.integer("qk_rope_head_dim", 64) / config.head_dim()
    values: dict[str, Any] = {"partial_rotary_factor": share}
    if kind == "main":
        values["rope_theta"] = config.number("rope_theta")
    else:
        values |= {key: value for key, value in stated.items() if key not in ("rope_theta", "partial_rotary_factor")}
        values["rope_theta"] = config.number("compress_rope_theta")
        if values.get("rope_type", values.get("type")) == "yarn":
            values.setdefault("attention_factor", 1.0)
    return rope_settings(HfConfig({**config, "rope_scaling": None, "rope_parameters": values}))


def _unified(config: HfConfig) -> HfConfig:
    """Published configs and those that transformers writes, under one set of keys."""
    config = config.with_defaults(DEFAULTS)
    count = config.integer("num_hidden_layers")
    stated: dict[str, Any] = {}
    rates = dict(config.section("compress_rates") if "compress_rates" in config else DEFAULT_RATES)
    for key, kind in (("compress_rate_csa", LIGHT), ("compress_rate_hca", HEAVY)):
        if key in config:
            rates[kind] = config.integer(key)
    stated["compress_rates"] = rates
    if "layer_types" not in config:
        stated["layer_types"] = _layer_types(config, count)
    if "mlp_layer_types" not in config:
        hashed = min(config.integer("num_hash_layers", DEFAULT_NUM_HASHED, least=0), count)
        stated["mlp_layer_types"] = [HASHED] * hashed + [ROUTED] * (count - hashed)
    return HfConfig({**config, **stated}, place=config.place)


def _layer_types(config: HfConfig, count: int) -> list[str]:
    """`compress_ratios` by layer (those of multi-token prediction may follow), else two heavy ones and both in turn."""
    ratios = config.get("compress_ratios")
    if ratios is None:
        return [HEAVY if layer < 2 or layer % 2 == 0 else LIGHT for layer in range(count)]
    if not isinstance(ratios, list) or len(ratios) < count or not all(ratio in RATIOS for ratio in ratios[:count]):
        known = ", ".join(str(ratio) for ratio in RATIOS)
        raise ValueError(f"{config.place}: compress_ratios must state one of {known} for each of {count} layers")
    return [RATIOS[ratio] for ratio in ratios[:count]]
