"""What names kept blocks: the same after a restart, another one when anything that changes K and V does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.fingerprint import SAMPLE_BYTES, fingerprint, identity
from headrace.hub.source import ModelSource
from headrace.seam import GroupSpec

GROUP = GroupSpec((0, 1), 2, 8, "float32", bytes_per_token=256)


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(1 << 20)
    (tmp_path / "model.safetensors").write_bytes(data)
    return ModelSource("hf", tmp_path, str(tmp_path))


def make(source: ModelSource, config: dict[str, Any] | None = None, groups: Any = (GROUP,), **changes: Any) -> str:
    facts = {"load_format": "auto", "dtype": "float32", "tokens_per_block": 32, **changes}
    return fingerprint(config or {"a": 1, "b": [2]}, source, groups, **facts)


def test_the_same_again(source: ModelSource) -> None:
    assert make(source) == make(source, {"b": [2], "a": 1}) and len(make(source)) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"a": 2, "b": [2]}},
        {"groups": (GroupSpec((0, 1), 2, 8, "bfloat16", bytes_per_token=128),)},
        {"groups": (GROUP, GROUP)},
        {"dtype": "bfloat16"},
        {"tokens_per_block": 64},
        {"num_ranks": 2},
        {"load_format": "dummy"},
    ],
)
def test_what_changes_it(source: ModelSource, change: dict[str, Any]) -> None:
    assert make(source, **change) != make(source)


@pytest.mark.parametrize("at", [0, SAMPLE_BYTES - 1, 1 << 19, (1 << 20) - 1])
def test_other_weights(source: ModelSource, at: int) -> None:
    """Anywhere in the data: by a sample, or by the time of the change."""
    path = source.path / "model.safetensors"
    before, about = make(source), path.stat()
    with path.open("r+b") as file:
        file.seek(about.st_size - (1 << 20) + at)
        file.write(b"\1")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert make(source) != before


def test_samples_alone_see_other_weights(source: ModelSource) -> None:
    path = source.path / "model.safetensors"
    before, about = identity(path), path.stat()
    data = bytearray(path.read_bytes())
    data[-(1 << 20) :] = bytes([7]) * (1 << 20)
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert identity(path)[:3] == before[:3] and identity(path) != before


def test_a_gguf_file_is_its_own_identity(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    source = ModelSource("gguf", path, "m")
    before = make(source)
    assert make(source) == before
    path.write_bytes(b"GGUF" + bytes(101))
    assert make(source) != before
