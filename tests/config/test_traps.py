from __future__ import annotations

from typing import Any

import pytest

from headrace.config.resolution import Typed, resolve
from headrace.config.traps import traps


def paths(*, server: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    """Of the traps in these settings; each is among the notes of the start."""
    flags = {name: Typed(f"--{name}", value) for name, value in (server or {}).items()}
    found = resolve(arguments={"model": "m", **settings}, server_flags=flags, refuse_missing_features=False)
    named = traps(found.args, found.server)
    assert set(named) <= set(found.notes)
    return [note.path for note in named]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"kv_cache_config": {"free_gpu_memory_fraction": 0.97}}, "kv_cache_config.free_gpu_memory_fraction"),
        ({"kv_cache_config": {"max_tokens": 512}}, "kv_cache_config.max_tokens"),
        (
            {"cuda_graph_config": {"batch_sizes": [256, 512, 1024], "enable_padding": True}},
            "cuda_graph_config.batch_sizes",
        ),
        ({"max_beam_width": 4}, "max_beam_width"),
        ({"fast_start": True}, "fast_start"),
        ({"server": {"api_keys": ["a", "b"]}}, "cache_salt_from_api_key"),
    ],
)
def test_a_trap_is_named(settings: dict[str, Any], path: str) -> None:
    assert path in paths(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_config": {"free_gpu_memory_fraction": 0.8, "max_tokens": 100_000}},
        {"cuda_graph_config": {"batch_sizes": [256, 512, 1024]}},
        {"cuda_graph_config": {"batch_sizes": [64, 128, 192], "enable_padding": True}},
        {"server": {"api_keys": ["a"]}},
        {"server": {"api_keys": ["a", "b"], "cache_salt_from_api_key": True}},
        {"server": {"api_keys": ["a", "b"]}, "kv_cache_config": {"enable_block_reuse": False}},
    ],
)
def test_what_is_well_is_not_named(settings: dict[str, Any]) -> None:
    assert paths(**settings) == []
