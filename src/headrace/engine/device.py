"""Which device and which dtype an engine computes with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.engine.groups import dtype_named

CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Processor flags (x86 and Arm) that mean products of bfloat16 in hardware."""


def pick_device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(wanted: str, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Dtype of weights and activations.

    `auto` is the checkpoint's own; a 16-bit checkpoint runs in float32 on a CPU that has no 16-bit
    products, where emulating them would be several times slower and no more exact.
    """
    if wanted != "auto":
        return dtype_named(wanted)
    named = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    stored = dtype_named(str(named).removeprefix("torch."))
    if device.type != "cpu" or stored == torch.float32:
        return stored
    return torch.bfloat16 if has_bf16_products() else torch.float32


def has_bf16_products() -> bool:
    return bool(CPU_BF16_FLAGS & cpu_flags())


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
