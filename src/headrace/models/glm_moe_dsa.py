"""GLM-5 (Zhipu AI 2026; also 5.2, 5.3): DeepSeek-V3.2 whose layers may share an earlier one's choice of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.indexer import SHARED, Indexer, indexer_kinds
from headrace.models._deepseek import V3_DEFAULTS, LatentDecoder, stated_indexer

__all__ = ["GlmMoeDsaModel"]


class GlmMoeDsaModel(LatentDecoder):
    """The indexer's rope turns neighbouring features, as the attention's does."""

    model_types = ("glm_moe_dsa",)
    is_sparse: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        **V3_DEFAULTS,
        "max_position_embeddings": 202_752,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
    }

    @staticmethod
    def indexer(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Indexer | None:
        if indexer_kinds(config)[index] == SHARED:
            return None
        return stated_indexer(config, factory, name, interleaved=True)
