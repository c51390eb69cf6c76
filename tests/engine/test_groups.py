"""Which layers share a pool, and how the configuration shortens their reach."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.attention.port import AttentionSpec
from headrace.config.kv import KvCacheConfig
from headrace.engine.groups import Reach, configured_reach, group_layers
from headrace.layers.port import StateSpec


def layer(window: int | None = None, kv_heads: int = 2) -> Any:
    return SimpleNamespace(spec=AttentionSpec(4, kv_heads, 8, 1.0, window=window))


@dataclass
class Recurrent:
    state: StateSpec

    def before(self, *_: Any) -> Any: ...

    def mix(self, *_: Any) -> Any: ...

    def after(self, *_: Any) -> Any: ...


def windows(layers: list[Any], **config: Any) -> list[tuple[int | None, int]]:
    reach = configured_reach(KvCacheConfig(**config), longest=100)
    specs = [reach.of(index, each.spec) for index, each in enumerate(layers)]
    return [(spec.window, spec.sink_tokens) for spec in specs]


def test_a_list_of_windows_is_repeated_over_layers() -> None:
    layers = [layer() for _ in range(5)]
    assert windows(layers, max_attention_window=[100, 8]) == [(None, 0), (8, 0), (None, 0), (8, 0), (None, 0)]
    assert windows(layers, max_attention_window=[99]) == [(99, 0)] * 5
    assert windows(layers) == [(None, 0)] * 5


def test_no_layer_sees_farther_than_its_model_lets_it() -> None:
    assert windows([layer(16), layer(16), layer()], max_attention_window=[8, 50, 1000]) == [(8, 0), (16, 0), (None, 0)]


def test_sinks_are_of_layers_with_a_window() -> None:
    assert windows([layer(16), layer()], sink_token_length=4) == [(16, 4), (None, 0)]
    assert windows([layer(16), layer()], sink_token_length=4, max_attention_window=[1000, 8]) == [(16, 4), (8, 4)]


def test_untouched_layers_keep_their_spec() -> None:
    spec = layer(16).spec
    assert Reach((8,), 100, 0).of(0, spec).window == 8
    assert Reach((16,), 100, 0).of(0, spec) is spec and Reach().of(0, spec) is spec


def test_groups_follow_the_reach() -> None:
    layers = [layer(), layer(16), layer(kv_heads=1), layer()]
    plain = group_layers(layers, torch.float32)
    assert [(group.layers, group.window) for group in plain] == [((0, 3), None), ((1,), 16), ((2,), None)]
    assert plain[0].bytes_per_token == 2 * 2 * 2 * 8 * 4
    short = group_layers(layers, torch.bfloat16, reach=Reach((16,), 100, 3))
    assert [(group.layers, group.window, group.sink_tokens) for group in short] == [((0, 1, 3), 16, 3), ((2,), 16, 3)]
    assert short[0].bytes_per_token == 2 * 3 * 2 * 8 * 2 and short[0].dtype == "bfloat16"


def test_recurrent_layers_are_one_group() -> None:
    small = StateSpec(((3,), (2, 4)), (torch.bfloat16, torch.float32))
    large = StateSpec(((100,),), (torch.float32,))
    groups = group_layers([Recurrent(small), layer(), Recurrent(large)], torch.float32)
    assert [group.layers for group in groups] == [(0, 2), (1,)]
    assert groups[0].is_recurrent and groups[0].state_bytes == 16 + 32 + 400 and groups[0].bytes_per_token == 0
    assert groups[0].block_bytes(32) == groups[0].state_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_follow_the_dtype_of_the_cache(dtype: str) -> None:
    (group,) = group_layers([layer()], getattr(torch, dtype))
    assert group.dtype == dtype and group.bytes_per_token == 2 * 2 * 8 * torch.finfo(getattr(torch, dtype)).bits // 8
