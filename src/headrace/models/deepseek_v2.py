"""DeepSeek-V2 (DeepSeek-AI 2024): V3 with experts chosen by softmax, by groups' best experts where it says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.layers.experts import Routing
from headrace.layers.hf_config import HfConfig
from headrace.models._deepseek import LatentDecoder

__all__ = ["DeepseekV2Model"]

GREEDY, GROUPED = "greedy", "group_limited_greedy"


class DeepseekV2Model(LatentDecoder):
    """`norm_topk_prob` has no effect, as in the published code."""

    model_types = ("deepseek_v2",)
    has_correction: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": GREEDY,
        "routed_scaling_factor": 1.0,
    }

    @staticmethod
    def routing(config: HfConfig) -> Routing:
        config.only({"scoring_func": "softmax"})
        method = config.text("topk_method", GREEDY)
        if method not in (GREEDY, GROUPED):
            raise ValueError(f"{config.place}: topk_method {method!r} is not known: it is {GREEDY} or {GROUPED}")
        is_grouped = method == GROUPED
        return Routing(
            num_experts=config.integer("n_routed_experts"),
            top_k=config.integer("num_experts_per_tok"),
            scaling=config.number("routed_scaling_factor"),
            num_groups=config.integer("n_group") if is_grouped else 1,
            top_groups=config.integer("topk_group") if is_grouped else 1,
            group_score="max",
        )
