"""The weight files of a Hugging Face folder, checked before anything is built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        weight_map: dict[str, str] = read_json(index).get("weight_map", {})
        paths = sorted({source.path / Path(file).name for file in weight_map.values()})
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ModelError(f"{source.path} lacks {', '.join(missing)}, named in {_INDEX}: fetch the folder again")
    else:
        paths = sorted(source.path.glob("*.safetensors"))
    if not paths:
        raise _no_weights(source.path)
    return {path: _tensor_names(path) for path in paths}


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
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise ModelError(f"{path} is truncated or not a safetensors file: fetch it again")
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
            offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            end_bytes = 8 + header_bytes + max((int(end) for _, end in offsets.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{path} has a damaged safetensors header: fetch it again") from None
    if size_bytes != end_bytes:
        raise ModelError(f"{path} is truncated: {size_bytes:,} bytes of {end_bytes:,}; fetch it again")
    return tuple(offsets)
