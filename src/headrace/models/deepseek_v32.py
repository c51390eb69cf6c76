"""DeepSeek-V3.2 (DeepSeek-AI 2025): V3 whose queries see the tokens that an indexer in each layer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.indexer import Indexer
from headrace.models._deepseek import V3_DEFAULTS, LatentDecoder, stated_indexer

__all__ = ["DeepseekV32Model"]


class DeepseekV32Model(LatentDecoder):
    """Below `index_topk` tokens queries see everything."""

    model_types = ("deepseek_v32",)
    is_sparse: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        **V3_DEFAULTS,
        "max_position_embeddings": 163_840,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    }

    @staticmethod
    def indexer(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Indexer | None:
        return stated_indexer(config, factory, name, interleaved=False)
