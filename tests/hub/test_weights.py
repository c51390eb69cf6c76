from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.hub.errors import ModelError
from headrace.hub.source import ModelSource
from headrace.hub.weights import safetensors_files


def source(folder: Path) -> ModelSource:
    return ModelSource(kind="hf", path=folder, name="test")


def test_names_come_from_every_file(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)}, tmp_path / "model.safetensors")
    files = safetensors_files(source(tmp_path))
    assert {path.name: sorted(names) for path, names in files.items()} == {"model.safetensors": ["a", "b"]}


def test_an_index_says_which_files_belong(tmp_path: Path) -> None:
    for part in ("one", "two", "stray"):
        save_file({part: np.zeros(2, np.float32)}, tmp_path / f"{part}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}))
    assert [path.name for path in safetensors_files(source(tmp_path))] == ["one.safetensors", "two.safetensors"]
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks two\.safetensors"):
        safetensors_files(source(tmp_path))


def test_truncated_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, path)
    good = path.read_bytes()
    for size in (0, 5, 20, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(ModelError, match="truncated") as error:
            safetensors_files(source(tmp_path))
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    for junk in (b"{not json", b"[1, 2]", b'{"a": {}}', b'{"a": {"data_offsets": "x"}}'):
        path.write_bytes(struct.pack("<Q", len(junk)) + junk)
        with pytest.raises(ModelError, match="damaged"):
            safetensors_files(source(tmp_path))


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        safetensors_files(source(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        safetensors_files(source(tmp_path))
