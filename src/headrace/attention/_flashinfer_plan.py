"""FlashInfer's schedules: made on the host once a step for all layers alike, over the pages that its prompts see.

The package is FlashInfer 0.6.6 or later (Ye et al. 2025, "FlashInfer: Efficient and Customizable Attention Engine").
It schedules on the host, so it needs the rows' lengths there, and no schedule can be a part of a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.port import AttentionSpec, AttentionStep
from headrace.kernels.quantise import FP8

HEAD_DIMS = (64, 128, 256)
HALVES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 1 << 20
"""Of what parts of one query's context would leave; contexts aren't split here, so that nothing is left there."""
HOPPER = 9
"""Major number of the GPUs that the package has faster kernels for, of caches in 16 bits."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What layers that share a schedule have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @staticmethod
    def of(spec: AttentionSpec, *, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Kernel:
        return Kernel(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window, spec.soft_cap,
            block_size, dtype, kv_dtype,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the context of some rows is, on the host: all of it that the kernel may read."""

    query_starts: Tensor  # [rows + 1] int32
    starts: Tensor  # [rows + 1] int32, of `places` by row
    places: Tensor  # [pages] int64, of the flattened block tables
    last_lens: Tensor  # [rows] int32, tokens in the last page


class Held:
    """A step's hold on a schedule: gone with the step."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper


class Planner:
    """Owns FlashInfer's wrappers. One is a step's for as long as that step's object lives."""

    def __init__(self, device: torch.device) -> None:
        self._package = package()
        self._device = device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._slots: dict[Kernel, list[_Slot]] = {}

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compile and load what these need, which takes minutes the first time on a machine.

        Raises:
            ValueError: it can't be compiled here.
        """
        for kernel in dict.fromkeys(kernels):
            pages = pages_of(((1, 1),), kernel, table_width=1)
            try:
                self._plan(kernel, pages, pages.places.int().to(self._device))
            except Exception as error:  # a compiler's, a linker's, a driver's
                reason = str(error).strip().splitlines()[-1:] or [""]
                raise ValueError(
                    f"FlashInfer can't compile its kernels here ({type(error).__name__}: {reason[0][:200]}): it needs"
                    " nvcc and ninja, or flashinfer-jit-cache; or set attn_backend to AUTO"
                ) from error

    def planned(self, step: AttentionStep, kernel: Kernel) -> Any:
        """The wrapper for the step's context rows, whose lengths the host knows."""
        key = f"flashinfer {kernel}"
        if key not in step.scratch:
            assert step.context_rows is not None
            tables = step.block_tables
            pages = pages_of(step.context_rows, kernel, table_width=tables.shape[1])
            places = _pinned(pages.places, self._device).to(self._device, non_blocking=True)
            step.scratch[key] = self._plan(kernel, pages, tables.flatten()[places])
        return step.scratch[key].wrapper

    def _plan(self, kernel: Kernel, pages: Pages, indices: Tensor) -> Held:
        slot = self._free_slot(kernel)
        slot.wait()
        slot.wrapper.plan(
            _pinned(pages.query_starts, self._device),
            _pinned(pages.starts, self._device),
            indices,
            _pinned(pages.last_lens, self._device),
            kernel.num_heads,
            kernel.num_kv_heads,
            kernel.head_dim,
            kernel.block_size,
            causal=True,
            sm_scale=kernel.scale,
            window_left=-1 if kernel.window is None else kernel.window - 1,
            logits_soft_cap=kernel.soft_cap,
            q_data_type=kernel.dtype,
            kv_data_type=kernel.kv_dtype,
            disable_split_kv=True,
        )
        return slot.take()

    def _free_slot(self, kernel: Kernel) -> _Slot:
        slots = self._slots.setdefault(kernel, [])
        for slot in slots:
            if slot.is_free:
                return slot
        wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "HND", backend=self._backend(kernel)
        )
        slots.append(_Slot(wrapper, self._device))
        return slots[-1]

    def _backend(self, kernel: Kernel) -> str:
        """The package's own choice has two kernels of one layer, by the length of prompts: compiled twice as long."""
        is_hopper = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device)[0] == HOPPER
        return "fa3" if is_hopper and kernel.kv_dtype == kernel.dtype else "fa2"


class _Slot:
    """A wrapper, who holds it, and when its buffer on the host may be written again."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._device = device
        self._holder: weakref.ref[Held] | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def is_free(self) -> bool:
        return self._holder is None or self._holder() is None

    def wait(self) -> None:
        """Until the last schedule has left the host. That of the step before the last has, so this rarely waits."""
        if self._copied is not None:
            self._copied.synchronize()

    def take(self) -> Held:
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()
        held = Held(self.wrapper)
        self._holder = weakref.ref(held)
        return held


def package() -> Any:
    """FlashInfer.

    Raises:
        ValueError: it isn't installed, or can't be imported.
    """
    try:
        return import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            raise ValueError(f"FlashInfer can't be imported, since {error.name} is missing: {REMEDY}") from error
        raise ValueError(f"attn_backend FLASHINFER needs the package flashinfer-python: {REMEDY}") from error
    except Exception as error:  # its import compiles, asks the driver, loads libraries
        raise ValueError(f"FlashInfer can't be imported ({type(error).__name__}: {error}): {REMEDY}") from error


REMEDY = "pip install 'headrace[flashinfer]', or set attn_backend to AUTO"


def unsupported(spec: AttentionSpec, *, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """What of a layer FlashInfer's kernels can't compute; None if nothing."""
    if spec.sinks is not None:
        return "attention sinks"
    if spec.sink_tokens:
        return "first tokens that are seen beside a window (kv_cache_config.sink_token_length)"
    if spec.is_chunked:
        return "attention within chunks"
    if spec.head_dim not in HEAD_DIMS:
        return f"heads of {spec.head_dim} features (it has kernels for {', '.join(map(str, HEAD_DIMS))})"
    if dtype not in HALVES:
        return f"{dtype_name(dtype)} (it computes in bfloat16 and float16)"
    if kv_dtype not in (dtype, FP8):
        return f"a KV cache of {dtype_name(kv_dtype)} beside {dtype_name(dtype)} (it takes the same, or fp8)"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pages_of(rows: Sequence[tuple[int, int]], kernel: Kernel, *, table_width: int) -> Pages:
    """
    Args:
        rows: (tokens of this step, length in the cache with them), of the first rows of the block tables.
        table_width: blocks of a row of those.
    """
    counts, lens = np.array(rows, np.int64).reshape(-1, 2).T
    size = kernel.block_size
    num_pages = -(-lens // size)
    starts = np.concatenate([[0], np.cumsum(num_pages)])
    of_page = np.repeat(np.arange(len(rows)), num_pages)
    place = np.arange(starts[-1]) - starts[of_page]
    if kernel.window is not None:
        # What all of a row's queries have left behind may be gone, and tiles reach into it: the first page that is
        # seen stands in, whose tokens are the row's own.
        first_seen = np.maximum(lens - counts - kernel.window + 1, 0)
        place = np.maximum(place, (first_seen // size)[of_page])
    return Pages(
        _int32(np.concatenate([[0], np.cumsum(counts)])),
        _int32(starts),
        torch.from_numpy(of_page * table_width + place),
        _int32(lens - (num_pages - 1) * size),
    )


def _int32(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))


def _pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """Where copies to the device don't wait for it."""
    return numbers.pin_memory() if device.type == "cuda" else numbers
