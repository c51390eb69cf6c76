from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.hub.errors import ModelError
from headrace.hub.gguf_header import read_header
from tests.hub.tiny_gguf import write_gguf, write_tiny_model

METADATA = {
    "a.text": "übergröße ✓",
    "a.flag": True,
    "a.small": 1e-5,
    "a.count": 7,
    "a.list": ["x", "", "日本"],
    "a.numbers": [1, -2, 3],
    "a.floats": [0.5, 0.1],
    "a.flags": [True, False],
}


def test_metadata_and_tensor_table_are_what_was_written(tmp_path: Path) -> None:
    tensors = {"one": (np.arange(6, dtype=np.float32).reshape(2, 3), "F32"), "two": (np.zeros(5, np.float16), "F16")}
    path = write_gguf(tmp_path / "m.gguf", "llama", METADATA, tensors)
    header = read_header(path)
    assert header.metadata == {"general.architecture": "llama", **METADATA, "a.floats": [0.5, 0.1]}
    assert [(info.name, info.shape, info.qtype.name) for info in header.tensors] == [
        ("one", (2, 3), "F32"),
        ("two", (5,), "F16"),
    ]
    first = header.tensors[0]
    raw = path.read_bytes()[first.offset_bytes : first.offset_bytes + first.num_bytes]
    np.testing.assert_array_equal(np.frombuffer(raw, np.float32).reshape(2, 3), tensors["one"][0])


def test_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m.gguf", "gemma3", storage=["Q4_K", "F16"], extra=METADATA)
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    ours = read_header(tmp_path / "m.gguf")
    assert [(t.name, t.data_offset, t.n_bytes) for t in theirs.tensors] == [
        (info.name, info.offset_bytes, info.num_bytes) for info in ours.tensors
    ]
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            expected = field.contents()
            np.testing.assert_equal(
                np.float32(ours.metadata[name]) if isinstance(expected, float) else ours.metadata[name],
                np.float32(expected) if isinstance(expected, float) else expected if name != "a.floats" else [0.5, 0.1],
            )


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    write_tiny_model(path, "llama", storage=["Q4_0"], extra=METADATA)
    return path.read_bytes()


def test_every_truncation_is_found_quickly(tmp_path: Path, good_file: bytes) -> None:
    path = tmp_path / "cut.gguf"
    start = time.perf_counter()
    for size in [*range(0, 3000, 41), len(good_file) // 2, len(good_file) - 1]:
        path.write_bytes(good_file[:size])
        with pytest.raises(ModelError) as error:
            read_header(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert time.perf_counter() - start < 10


def test_truncated_data_says_how_much_is_missing(tmp_path: Path, good_file: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(good_file[:-1000])
    with pytest.raises(ModelError, match=f"truncated: {len(good_file) - 1000:,} bytes of at least {len(good_file):,}"):
        read_header(path)


@settings(max_examples=150, deadline=5000)
@given(position=st.integers(0, 2500), junk=st.binary(min_size=1, max_size=9))
def test_damaged_bytes_never_hang_or_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, good_file: bytes, position: int, junk: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(good_file[:position] + junk + good_file[position + len(junk) :])
    try:
        read_header(path)
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "metadata entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "tensors"),
    ],
)
def test_other_files_are_told_apart(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_header(path)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be read"):
        read_header(tmp_path / "none.gguf")
