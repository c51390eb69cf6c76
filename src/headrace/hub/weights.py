"""The weight files of a Hugging Face folder, checked before anything is built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from headrace.hub.config import read_json
from headrace.hub.errors import ModelError
from headrace.hub.source import ModelSource

__all__ = ["safetensors_files"]

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def safetensors_files(source: ModelSource) -> dict[Path, tuple[str, ...]]:
    """The safetensors files of a Hugging Face folder, with the tensor names in each. Reads headers only.

    Raises:
        ModelError: no weights, only pickled ones (never loaded), a missing shard, a truncated or damaged file.
    """
    assert source.kind == "hf", "GGUF files have their tensors in GgufFile"
    index = source.path / _INDEX
    if index.is_file():
        paths = _listed_files(index)
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ModelError(f"{source.path} lacks {', '.join(missing)}, named in {_INDEX}: fetch the folder again")
    else:
        paths = sorted(path for path in source.path.glob("*.safetensors") if path.is_file())
    if not paths:
        raise _no_weights(source.path)
    return {path: _tensor_names(path) for path in paths}


def _listed_files(index: Path) -> list[Path]:
    weight_map: Any = read_json(index).get("weight_map", {})
    names: set[Any] = set(cast("dict[str, Any]", weight_map).values()) if isinstance(weight_map, dict) else {None}
    if not all(isinstance(name, str) for name in names):
        raise ModelError(f"{index} has no weight_map of file names by tensor: fetch it again")
    return sorted(index.parent / Path(name).name for name in names)


def _no_weights(folder: Path) -> ModelError:
    pickled = [path.name for pattern in _PICKLED for path in folder.glob(pattern)]
    if pickled:
        return ModelError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code and are never loaded:"
            " convert them with transformers (save_pretrained writes safetensors)"
        )
    return ModelError(f"{folder} has no .safetensors files: fetch the weights, or set load_format: dummy")


def _tensor_names(path: Path) -> tuple[str, ...]:
    """Format: 8 bytes of header length, a JSON header, the data (safetensors' format description)."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
                raise ModelError(f"{path} is truncated or not a safetensors file: fetch it again")
            text = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}): check its permissions") from None
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        end_bytes = 8 + header_bytes + _data_bytes(header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path} has a damaged safetensors header: fetch it again") from None
    if size_bytes != end_bytes:
        what = "is truncated" if size_bytes < end_bytes else "has more than its header lists"
        raise ModelError(f"{path} {what}: {size_bytes:,} bytes of {end_bytes:,}; fetch it again")
    return tuple(header)


def _data_bytes(header: dict[str, Any]) -> int:
    """The end of the last tensor. Tensors have to follow each other without gaps, as the format asks.

    Raises:
        ValueError, KeyError, TypeError: an entry that isn't one.
    """
    places: list[tuple[int, int]] = []
    for entry in header.values():
        begin, end = entry["data_offsets"]
        is_shape = all(type(number) is int and number >= 0 for number in entry["shape"])
        if not isinstance(entry["dtype"], str) or not is_shape:
            raise ValueError("no dtype and shape")
        places.append((begin, end))
    position = 0
    for begin, end in sorted(places):
        if type(begin) is not int or type(end) is not int or begin != position or end < begin:
            raise ValueError("tensors overlap or leave gaps")
        position = end
    return position
