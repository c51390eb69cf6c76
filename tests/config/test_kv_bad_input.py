"""What is wrong with a KV cache's settings is said before anything is loaded, with the field's name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import machine
from headrace.config.errors import ConfigError
from headrace.config.resolution import resolve

GIB = 1 << 30


def problems(cache: dict[str, Any], **arguments: Any) -> dict[str, str]:
    try:
        resolve(arguments={"kv_cache_config": cache, **arguments}, needs_model=False, refuse_missing_features=False)
    except ConfigError as error:
        return {problem.path.removeprefix("kv_cache_config."): problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("cache", "path", "message"),
    [
        ({"tokens_per_block": 24}, "tokens_per_block", "power of two greater than 1, got 24"),
        ({"tokens_per_block": 1}, "tokens_per_block", "greater than 1"),
        ({"max_attention_window": [64, 0]}, "max_attention_window[1]", "greater than 0"),
        ({"max_attention_window": []}, "max_attention_window", "at least one window"),
        ({"sink_token_length": -1}, "sink_token_length", "greater than or equal to 0"),
        ({"free_gpu_memory_fraction": 1.5}, "free_gpu_memory_fraction", "less than or equal to 1"),
        ({"free_gpu_memory_fraction": -0.1}, "free_gpu_memory_fraction", "greater than or equal to 0"),
        ({"max_tokens": 31}, "max_tokens", "31 is less than one block: at least 32 is needed"),
        ({"max_tokens": 63, "tokens_per_block": 64}, "max_tokens", "less than one block"),
        ({"pool_ratio": [0.5, 0.4]}, "pool_ratio", "add up to 1"),
        ({"pool_ratio": [1.5, -0.5]}, "pool_ratio", "positive"),
        ({"mamba_state_config": {"periodic_snapshot_interval": 48}}, "mamba_state_config.periodic_snapshot_interval",
         "48 is no multiple of tokens_per_block (32)"),
        ({"mamba_state_cache_interval": 100}, "mamba_state_cache_interval", "100 is no multiple"),
        ({"secondary_offload_min_priority": 101}, "secondary_offload_min_priority", "less than or equal to 100"),
        ({"disk_cache_size": GIB}, "disk_cache_path", "required when disk_cache_size is set"),
        ({"max_util_for_resume": 0}, "max_util_for_resume", "greater than 0"),
    ],
)  # fmt: skip
def test_refused_by_name(cache: dict[str, Any], path: str, message: str) -> None:
    found = problems(cache)
    assert list(found) == [path] and message in found[path]


@pytest.mark.parametrize(
    "cache",
    [
        {"tokens_per_block": 64, "max_tokens": 64, "mamba_state_config": {"periodic_snapshot_interval": 256}},
        {"max_attention_window": [4096, 256], "sink_token_length": 4, "free_gpu_memory_fraction": 1},
        {"sink_token_length": 0, "mamba_state_cache_interval": 0},
    ],
)
def test_what_is_fine(cache: dict[str, Any]) -> None:
    assert problems(cache) == {}


def test_a_host_tier_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.config.rules.total_memory_bytes", lambda: 8 * GIB)
    found = problems({"host_cache_size": 9 * GIB})
    assert found == {
        "host_cache_size": "9,663,676,416 bytes are more than this machine's 8,589,934,592 bytes of memory: lower it"
    }
    assert problems({"host_cache_size": 7 * GIB}) == {}
    found = problems({"host_cache_size": 5 * GIB}, tensor_parallel_size=2)
    assert "5,368,709,120 bytes for each of 2 ranks" in found["host_cache_size"]
    assert problems({"host_cache_size": 5 * GIB}, tensor_parallel_size=2, gpus_per_node=1) == {}


def disk(path: Path, size_bytes: int) -> str:
    return problems({"disk_cache_size": size_bytes, "disk_cache_path": str(path)}).get("disk_cache_path", "")


def test_a_disk_folder_that_is_missing_or_none(tmp_path: Path) -> None:
    assert disk(tmp_path, 1 << 20) == ""
    assert "is no folder: create it first" in disk(tmp_path / "missing", 1 << 20)
    (tmp_path / "file").write_text("x")
    assert "is a file: name a folder" in disk(tmp_path / "file", 1 << 20)


def test_a_disk_folder_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))
    assert "can't be written: change its permissions" in disk(tmp_path, 1 << 20)


def test_a_disk_that_is_too_small_unless_the_cache_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    message = disk(tmp_path, (1 << 20) + 1)
    assert "has 1,048,576 bytes free, less than the 1,048,577 of disk_cache_size" in message
    (tmp_path / "kept").write_bytes(bytes(8192))
    assert disk(tmp_path, (1 << 20) + 4096) == ""


def test_another_machines_file_can_be_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"host_cache_size": 1 << 50, "disk_cache_size": 1, "disk_cache_path": "/no/such/folder"}
    options = {"needs_model": False, "refuse_missing_features": False}
    resolve(arguments={"kv_cache_config": cache}, **options, for_this_machine=False)
    with pytest.raises(ConfigError):
        resolve(arguments={"kv_cache_config": cache}, **options)


def test_memory_of_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"memory.max": 3 * GIB, "memory.current": GIB}
    monkeypatch.setattr(machine, "_meminfo", lambda name: {"MemTotal": 8 * GIB, "MemAvailable": 4 * GIB}[name])
    monkeypatch.setattr(machine, "_control_group", groups.get)
    assert machine.total_memory_bytes() == 3 * GIB and machine.free_memory_bytes() == 2 * GIB
    groups.clear()
    assert machine.total_memory_bytes() == 8 * GIB and machine.free_memory_bytes() == 4 * GIB
