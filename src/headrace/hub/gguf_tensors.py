"""Tensors of a GGUF file under their Hugging Face names and with Hugging Face values.

The converter that writes GGUF files changes three things besides the names, undone here: it interleaves the rows of
llama's q and k projections for its rope (architecture `llama` only), it adds one to gemma's norm weights, and it
stores nothing for a tied output head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from headrace.hub.errors import ModelError
from headrace.hub.gguf_header import TensorInfo

__all__ = ["SIDE_TENSORS", "GgufTensor", "hugging_face_name", "map_tensors"]

Float32Array = NDArray[np.float32]

CHUNK_ELEMENTS = 1 << 22
"""Elements dequantised at once; bounds the working memory to a few times 16 MiB."""

_DEQUANT_ELEMENTS = 1 << 15
"""Elements in one of the pieces that `dequantize` handles in a numpy call, small enough for the CPU's cache."""

SIDE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that describe the rope; they become part of the config, not of the weights."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_TOP = re.compile(r"(\w+)\.(weight|bias)")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LLAMA_ROPED = re.compile(r"\.(q|k)_proj\.(weight|bias)$")
_NORM = re.compile(r"(norm|layernorm)\.weight$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One weight: its Hugging Face name, and ways to read it. Nothing is read until asked for."""

    name: str
    qtype: str
    """The file's storage type: F32, F16, BF16, Q4_1, Q6_K, ..."""
    shape: tuple[int, ...]
    """[rows, columns] or [elements], as Hugging Face has it. A vector counts as rows of one column."""
    stored: NDArray[np.uint8]
    """[rows, bytes per row], a view of the mapped file in the file's order of rows."""
    row_order: NDArray[np.int64] | None
    """Row of the file by row of this tensor, where the file has another order."""
    offset: float
    """What the file added to each value."""

    def packed(self) -> NDArray[np.uint8]:
        """The bytes as stored, rows in Hugging Face order. [rows, bytes per row]; a copy if the order differs."""
        return self.stored if self.row_order is None else self.stored[self.row_order]

    def load(self, start: int = 0, stop: int | None = None) -> Float32Array:
        """Rows start..stop-1 (all of them by default) as float32. [rows, columns] or [elements]."""
        stop = self.shape[0] if stop is None else stop
        assert 0 <= start <= stop <= self.shape[0]
        out = np.empty((stop - start, *self.shape[1:]), dtype=np.float32)
        for row, chunk in self.chunks(start, stop):
            out[row - start : row - start + len(chunk)] = chunk
        return out

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Float32Array]]:
        """(first row, its rows as float32) in order, each of at most about 4 million elements (or one row)."""
        stop = self.shape[0] if stop is None else stop
        num_columns = math.prod(self.shape[1:])
        rows_at_once = max(1, CHUNK_ELEMENTS // num_columns)
        for row in range(start, stop, rows_at_once):
            rows = slice(row, min(row + rows_at_once, stop))
            stored = self.stored[rows] if self.row_order is None else self.stored[self.row_order[rows]]
            values = _dequantize(stored, GGMLQuantizationType[self.qtype], num_columns)
            values = np.reshape(values, (-1, *self.shape[1:]))
            yield row, values - np.float32(self.offset) if self.offset else values


def _dequantize(stored: NDArray[np.uint8], qtype: GGMLQuantizationType, num_columns: int) -> Float32Array:
    """[rows, bytes per row] -> [rows, num_columns]."""
    if qtype in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
        return dequantize(stored, qtype)
    # `dequantize` takes 16 rows a step, too few elements to be fast for narrow rows; blocks don't know about rows,
    # so rows are joined until a step is large enough.
    num_rows = stored.shape[0]
    join = max(1, _DEQUANT_ELEMENTS // (16 * num_columns))
    whole = num_rows - num_rows % join
    out = np.empty((num_rows, num_columns), dtype=np.float32)
    if whole:
        out[:whole] = np.reshape(
            dequantize(np.reshape(stored[:whole], (whole // join, -1)), qtype), (whole, num_columns)
        )
    if whole < num_rows:
        out[whole:] = dequantize(stored[whole:], qtype)
    return out


def hugging_face_name(gguf_name: str, architecture: str) -> str | None:
    """The name in Hugging Face's text models, or None for a tensor that is not known."""
    layer_names = _GEMMA3_LAYER_NAMES if architecture == "gemma3" else _LAYER_NAMES
    if match := _LAYER.fullmatch(gguf_name):
        layer, leaf, kind = match.groups()
        return f"model.layers.{layer}.{layer_names[leaf]}.{kind}" if leaf in layer_names else None
    if match := _TOP.fullmatch(gguf_name):
        leaf, kind = match.groups()
        return f"{_TOP_NAMES[leaf]}.{kind}" if leaf in _TOP_NAMES else None
    return None


def map_tensors(
    infos: Iterable[TensorInfo],
    data: NDArray[np.uint8],
    *,
    architecture: str,
    config: dict[str, Any],
    path: Path,
) -> Iterator[GgufTensor]:
    """The weights of a file, in file order.

    `data` is the whole mapped file; `config` the Hugging Face config of the same file.

    Raises:
        ModelError: tensors that the architecture doesn't have (all are named), before the first is yielded.
    """
    wanted = [info for info in infos if info.name not in SIDE_TENSORS]
    for info in wanted:
        if len(info.shape) > 2 or (len(info.shape) == 1 and GGML_QUANT_SIZES[info.qtype][0] > 1):
            raise ModelError(
                f"{path}: tensor {info.name} of {info.qtype.name} {list(info.shape)} is neither a matrix nor a plain"
                " vector; use a file that the standard converter wrote"
            )
    names = {info.name: hugging_face_name(info.name, architecture) for info in wanted}
    if unknown := sorted(name for name, mapped in names.items() if mapped is None):
        raise ModelError(
            f"{path} holds tensors that architecture {architecture} doesn't have: {', '.join(unknown)};"
            " use a file converted for it, or the Hugging Face folder of the model"
        )
    for info in wanted:
        name = names[info.name]
        assert name is not None
        stored = np.reshape(data[info.offset_bytes : info.offset_bytes + info.num_bytes], (info.shape[0], -1))
        row_order = None
        if architecture == "llama" and (match := _LLAMA_ROPED.search(name)):
            key = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            if config[key] < 1 or info.shape[0] % (2 * config[key]):
                raise ModelError(
                    f"{path}: tensor {info.name} has {info.shape[0]} rows, which are no whole halves of {config[key]}"
                    " heads: its metadata belongs to another model, or is damaged; fetch the file again"
                )
            row_order = _halves_order(info.shape[0], config[key])
        yield GgufTensor(
            name=name,
            qtype=info.qtype.name,
            shape=info.shape,
            stored=stored,
            row_order=row_order,
            offset=1.0 if architecture == "gemma3" and _NORM.search(name) else 0.0,
        )


def _halves_order(num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """File row by Hugging Face row: within a head, the file alternates rows of the first and of the second half."""
    half = num_rows // num_heads // 2
    rows = np.reshape(np.arange(num_rows, dtype=np.int64), (num_heads, half, 2))
    return np.reshape(np.swapaxes(rows, 1, 2), (-1,))
