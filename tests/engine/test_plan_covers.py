"""For every model type there is: what `headrace plan` counts of its cache, a token and a sequence, is what is
allocated, and its weights are those that are loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.config.llm_args import LlmArgs
from headrace.engine.backends import Backends
from headrace.engine.build import build_model, known_model_types
from headrace.engine.groups import group_layers
from headrace.engine.pools import KvPools
from headrace.engine.states import States, state_specs
from headrace.hub.rank_share import Ranks
from headrace.hub.read_shape import read_shape
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.quant.none import Dense
from headrace.runtime.forecast import Spread, forecast
from headrace.runtime.gpus import Device
from tests.kits.model import tiny_config
from tests.kits.tiny import ROWS, tiny_model
from tests.kits.tiny_kimi_k3 import KIMI_K3
from tests.models.test_contract import NOT_CAUSAL, skip_unless_known

FORMS = [name for name, row in ROWS.items() if row.of]
BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 32, 3, 2


def config_of(name: str) -> dict[str, Any]:
    """name: a model type, or another form of one."""
    if name == "kimi_k3":
        return {"model_type": name, "text_config": KIMI_K3}
    if name not in NOT_CAUSAL:
        return tiny_config(name).to_dict() | {"model_type": tiny_model(name).of or name}
    text = {"minimax_m3_vl": "minimax_m3_vl_text", "mistral3": "mistral"}.get(name, f"{name}_text")
    return {"model_type": name, "text_config": tiny_config(text).to_dict(), "vision_config": {}}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [*sorted(known_model_types()), *FORMS])
def test_bytes_are_those_that_are_allocated(name: str, size: int) -> None:
    if name != "kimi_k3" and name not in NOT_CAUSAL:
        skip_unless_known(name)
    config = config_of(name)
    args = LlmArgs(model="m", dtype="bfloat16", tensor_parallel_size=size)
    (stage,) = forecast(args, read_shape(config), Spread(Device("cpu", 1 << 34, 0), Ranks(size))).stages
    dense = Dense()
    parallel = ParallelContext(0, size)
    model = build_model(config, LayerFactory(dtype=torch.bfloat16, recipe=lambda _: dense, parallel=parallel))
    assert model.weight_map().weight_bytes == stage.facts.weight_bytes
    groups = group_layers(model.layers, torch.bfloat16)
    assert groups == stage.facts.groups
    pools = KvPools(groups, [NUM_BLOCKS] * len(groups), block_size=BLOCK_SIZE, backends=Backends())
    states = States(groups, state_specs(model.layers), num_slots=NUM_SLOTS)
    for group, arena in zip(stage.facts.groups, pools.arenas):
        per_block = group.state_bytes if group.is_recurrent else group.block_bytes(BLOCK_SIZE)
        assert arena.nbytes == NUM_BLOCKS * per_block
        if not group.is_recurrent:
            assert group.block_bytes(BLOCK_SIZE) == BLOCK_SIZE * group.bytes_per_token or group.every > 1
    live = sum(group.state_bytes for group in stage.facts.groups)
    assert states.size_bytes == (NUM_SLOTS + 1) * live
