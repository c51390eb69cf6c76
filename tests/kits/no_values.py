"""A GPU that isn't there: tensors have shapes and types but no values, and kernels do nothing.

What reads a value on the host, or makes a shape of one, fails here. So a step that passes asks the device for nothing,
which is what a CUDA graph of it takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.engine.backends import Backends
from headrace.engine.batch import generation_batch
from headrace.engine.build import build_model
from headrace.engine.groups import group_layers
from headrace.engine.pools import KvPools
from headrace.engine.runner import Runner
from headrace.engine.slots import SlotState
from headrace.engine.states import States, state_specs
from headrace.kernels import _triton_chain
from headrace.layers import experts
from headrace.layers.experts_backend import find_backend
from headrace.layers.factory import LayerFactory
from headrace.layers.port import Model
from headrace.quant.none import Dense

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 4, 8, 4
DEVICE = torch.device("meta")


class HostMemory(RuntimeError):
    """A step copies from memory of the host, which a graph that is replayed would read long after."""


class NoUploads(TorchDispatchMode):
    """Tensors of the host that come to the device are errors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
        if any(value.device.type == "cpu" for value in given) and isinstance(out, Tensor) and out.device == DEVICE:
            raise HostMemory(f"{func} takes a tensor of the host")
        return out


@contextlib.contextmanager
def no_values() -> Iterator[None]:
    """Tensors of the device without values say that they are a GPU's. Needs Triton and its interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.device == DEVICE), raising=False)
        patch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None)
        patch.setattr(_triton_chain, "_can_chain", lambda _: True)
        patch.setattr(experts, "find_backend", lambda name, _: find_backend(name, "cuda"))
        yield


def generate(config: Mapping[str, Any], *, num_rows: int = 3) -> Tensor:
    """Inside `no_values`: one step of generation rows as the engine captures it. -> logits [rows, vocab]"""
    dense = Dense()
    model = build_model(config, LayerFactory(dtype=torch.bfloat16, recipe=lambda _: dense, device=DEVICE))
    fill(model)
    groups = group_layers(model.layers, torch.bfloat16)
    backends = Backends("triton")
    sizes = [NUM_BLOCKS] * len(groups)
    pools = KvPools(groups, sizes, block_size=BLOCK_SIZE, backends=backends, device=DEVICE)
    states = States(groups, state_specs(model.layers), num_slots=NUM_SLOTS, device=DEVICE)
    runner = Runner(model, backends, pools, states=states.layers)
    state = SlotState(NUM_SLOTS, num_groups=len(groups), max_blocks=NUM_BLOCKS, device=DEVICE)
    slots = torch.arange(num_rows, device=DEVICE)
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=DEVICE)
    with torch.inference_mode(), NoUploads():
        batch = generation_batch(
            slots, starts, state, groups=groups, block_size=BLOCK_SIZE, max_kv=NUM_BLOCKS * BLOCK_SIZE
        )
        return runner.logits(runner.forward(batch.ids, batch.groups))


def fill(model: Model) -> None:
    """Parameters as if a checkpoint had been loaded. Then values may be read: each is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__float__", lambda _: 1.0)
        for module in model.weight_map().modules:
            for parameter in module.parameters:
                for slot in parameter.slots:
                    parameter.view(slot)
                    parameter.mark_loaded(slot)
            module.finish()
