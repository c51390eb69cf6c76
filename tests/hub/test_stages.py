"""Pipeline stages, and layers that have to stay together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.hub.errors import ModelError
from headrace.hub.read_shape import read_shape
from headrace.hub.shape import LayerShape
from headrace.hub.stages import stages

GEMMA_4_E2B = {
    "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "sliding_window": 512,
    "num_kv_shared_layers": 20, "vocab_size": 262_144, "max_position_embeddings": 131_072,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
}  # fmt: skip


def layers(sources: Sequence[int | None]) -> list[LayerShape]:
    return [LayerShape(None, (), source) for source in sources]


def test_layers_that_share_nothing() -> None:
    model = layers([None] * 61)
    assert stages(model, 4) == [range(16), range(16, 31), range(31, 46), range(46, 61)]
    assert stages(model[:5], 2, [1, 4]) == [range(1), range(1, 5)]
    with pytest.raises(ModelError, match=r"pp_partition: stages of \[1, 3\] layers don't make up the model's 5"):
        stages(model[:5], 2, [1, 3])
    with pytest.raises(ModelError, match="pipeline_parallel_size: 3 stages are too many for 2 layers: use at most 2"):
        stages(model[:2], 3)


def test_layers_stay_with_those_whose_keys_and_values_they_attend_to() -> None:
    """Gemma 4 E2B: 20 of 35 layers share what layers 13 (windows) and 14 (everything) keep."""
    model = read_shape(GEMMA_4_E2B).layers
    assert [layer.source for layer in model[:16]] == [None] * 15 + [13] and model[19].source == 14
    assert stages(model, 2) == [range(13), range(13, 35)]
    assert stages(model, 3) == [range(12), range(12, 13), range(13, 35)]
    assert stages(model, 2, [10, 25]) == [range(10), range(10, 35)]
    with pytest.raises(ModelError, match=r"before layer 20 parts layer 20 from layer 13, .* the layers 1 to 13$"):
        stages(model, 2, [20, 15])
    with pytest.raises(ModelError, match="15 stages are too many for 35 layers, some of which share .* at most 14"):
        stages(model, 15)


def test_layers_stay_with_those_whose_choice_they_take_over() -> None:
    config: dict[str, Any] = {
        "model_type": "glm_moe_dsa", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 6, "num_attention_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4, "index_head_dim": 8,
        "index_n_heads": 2, "vocab_size": 100, "max_position_embeddings": 100,
        "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
    }  # fmt: skip
    model = read_shape(config).layers
    assert [layer.source for layer in model] == [None, None, 1, None, 3, 3]
    assert stages(model, 2) == [range(3), range(3, 6)] and stages(model, 3) == [range(1), range(1, 3), range(3, 6)]


drawn = st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=10).map(
    lambda listed: [source if source is not None and source < at else None for at, source in enumerate(listed)]
)


@settings(max_examples=200, deadline=None)
@given(drawn, st.integers(1, 5))
def test_any_split_keeps_what_is_shared_together(sources: list[int | None], count: int) -> None:
    """As an obvious search says: whether there is one at all, and none that is stated and parts them is taken."""

    def holds(ends: Sequence[int]) -> bool:
        return all(
            not any(source < end <= at for end in ends) for at, source in enumerate(sources) if source is not None
        )

    model = layers(sources)
    possible = [ends for ends in combinations(range(1, len(sources)), count - 1) if holds(ends)]
    if not possible:
        with pytest.raises(ModelError, match="too many"):
            stages(model, count)
        return
    found = stages(model, count)
    assert tuple(part.stop for part in found[:-1]) in possible and all(found)
    for ends in combinations(range(1, len(sources)), count - 1):
        edges = [0, *ends, len(sources)]
        partition = [b - a for a, b in pairwise(edges)]
        if ends in possible:
            assert [part.stop for part in stages(model, count, partition)] == edges[1:]
        else:
            with pytest.raises(ModelError, match="pp_partition"):
                stages(model, count, partition)
