"""Which device and which dtype an engine computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.engine.groups import dtype_named
from headrace.kernels._native import processor_features
from headrace.kernels.packed_linear import can_pack

COMPUTE_DTYPES = ("float32", "float16", "bfloat16")
CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Processor flags (x86 and Arm) that mean products of bfloat16 in hardware."""


def pick_device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(wanted: str, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Dtype of weights and activations.

    `auto` is the checkpoint's own. Only where neither the processor nor the compiled kernels multiply
    bfloat16 does a 16-bit checkpoint run in float32: torch would emulate it, several times slower.
    """
    if wanted != "auto":
        return dtype_named(wanted)
    named = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = str(named).removeprefix("torch.")
    if name not in COMPUTE_DTYPES:
        raise ValueError(
            f"config.json: dtype {name!r} is not one to compute with: choose {', '.join(COMPUTE_DTYPES)} with --dtype"
        )
    stored = dtype_named(name)
    if device.type != "cpu" or stored == torch.float32:
        return stored
    return torch.bfloat16 if can_pack() or CPU_BF16_FLAGS & processor_features() else torch.float32


def kv_cache_dtype(wanted: str, compute: torch.dtype, device: torch.device, *, is_kv_fp8: bool) -> torch.dtype:
    """Dtype of the KV cache.

    Args:
        wanted: `kv_cache_config.dtype`; `auto` is the checkpoint's wish on a GPU, the model's dtype elsewhere.
        is_kv_fp8: the checkpoint's wish.

    Raises:
        ValueError: an FP8 cache without a GPU.
    """
    is_fp8 = wanted in ("fp8", "float8_e4m3fn")
    if is_fp8 and device.type != "cuda":
        raise ValueError("kv_cache_config.dtype: fp8 needs a GPU: use auto")
    if is_fp8 or (wanted == "auto" and is_kv_fp8 and device.type == "cuda"):
        return torch.float8_e4m3fn
    return compute if wanted == "auto" else dtype_named(wanted)


def state_dtype(wanted: str) -> torch.dtype | None:
    """Dtype of recurrent states: `kv_cache_config.mamba_ssm_cache_dtype`; None leaves it to the model's config."""
    return None if wanted == "auto" else dtype_named(wanted)
