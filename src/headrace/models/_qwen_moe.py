"""The MLPs of Qwen's mixtures of experts: dense in some layers, in some models with a shared expert behind a gate."""

from __future__ import annotations

from headrace.layers.experts import Experts, Routing, expert_act, is_sparse, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp


def qwen_mlp(
    config: HfConfig,
    factory: LayerFactory,
    name: str,
    index: int,
    *,
    count: int,
    normalises: bool = False,
    has_shared: bool = False,
) -> Mlp | Experts:
    """
    Args:
        count: experts where a config states no number.
        normalises: whether chosen weights are, where it states neither.
    """
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
            num_experts=num_experts(config, count),
            top_k=config.integer("num_experts_per_tok"),
            normalise=config.flag("norm_topk_prob", normalises),
        ),
        act=expert_act(act),
        shared_size=config.integer("shared_expert_intermediate_size") if has_shared else None,
        shared_act=act,
        has_shared_gate=has_shared,
    )
