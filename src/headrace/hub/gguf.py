"""A GGUF file: metadata, Hugging Face config, tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from headrace.hub.errors import ModelError
from headrace.hub.gguf_config import hugging_face_config
from headrace.hub.gguf_header import GgufHeader, read_header
from headrace.hub.gguf_tensors import SIDE_TENSORS, GgufTensor, map_tensors

__all__ = ["GgufFile", "GgufTensor"]


class GgufFile:
    """One .gguf file, memory-mapped; the tensor data is read only when a tensor is.

    Raises (constructor):
        ModelError: not a GGUF file, truncated, damaged, or of an unsupported version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._header: GgufHeader = read_header(self.path)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata by key: int, float, bool, str, or lists of these."""
        return self._header.metadata

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as llama."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def num_weights(self) -> int:
        """How many tensors `tensors` yields."""
        return sum(info.name not in SIDE_TENSORS for info in self._header.tensors)

    def hf_config(self) -> dict[str, Any]:
        """The config as Hugging Face's config.json would have it, for llama, qwen2, qwen3 and gemma3 files.

        Raises:
            ModelError: another architecture, or a variant of these that is not supported.
        """
        return dict(self._config)

    def tensors(self) -> Iterator[GgufTensor]:
        """The weights under Hugging Face names, in file order. A tied output head is not among them.

        Raises:
            ModelError: tensors that the architecture doesn't have (all are named), before the first is yielded.
        """
        return map_tensors(
            self._header.tensors, self._data, architecture=self.architecture, config=self._config, path=self.path
        )

    @cached_property
    def _config(self) -> dict[str, Any]:
        infos = self._header.tensors
        try:
            return hugging_face_config(
                self.metadata,
                shapes={info.name: info.shape for info in infos},
                qtypes={info.qtype.name for info in infos if len(info.shape) > 1},
                read_vector=self._vector,
            )
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None

    @cached_property
    def _data(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def _vector(self, name: str) -> NDArray[np.float32]:
        info = next((info for info in self._header.tensors if info.name == name), None)
        if info is None or info.qtype not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            raise ModelError(f"tensor {name} is missing or not of plain floats: convert the model again")
        return dequantize(self._data[info.offset_bytes : info.offset_bytes + info.num_bytes], info.qtype)
