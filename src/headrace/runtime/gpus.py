"""Memory of devices by name, for planning without one."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""About what a process takes of a GPU before it allocates anything: context, kernels, the allocator's rounding."""
COLLECTIVES_BYTES = 512 * MIB
"""About what NCCL's buffers take on each GPU of several."""

MEMORY_MIB = {
    "t4": 15_360,
    "v100": 32_768,
    "l4": 23_034,
    "a10g": 23_028,
    "a10": 23_028,
    "rtx3090": 24_576,
    "rtx4090": 24_564,
    "rtx5090": 32_607,
    "a40": 46_068,
    "l40": 46_068,
    "l40s": 46_068,
    "rtx6000ada": 49_140,
    "rtxpro6000": 97_887,
    "a100-40gb": 40_960,
    "a100": 81_920,
    "h100": 81_559,
    "h100nvl": 95_830,
    "h20": 97_871,
    "gh200": 97_871,
    "h200": 143_771,
    "b200": 183_359,
    "gb200": 189_471,
    "b300": 275_040,
    "gb300": 284_208,
}
"""As the driver reports it; `a100` and `h100` are those of 80 GB."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|mib|mb|m)", re.IGNORECASE)
_UNITS = {"gib": 1 << 30, "g": 1 << 30, "gb": 10**9, "mib": MIB, "m": MIB, "mb": 10**6}


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank runs on."""

    name: str
    memory_bytes: int
    reserved_bytes: int
    """Taken before anything is allocated."""


def gpu_named(text: str, *, num_ranks: int) -> Device:
    """A GPU by name (`h200`), or any device by the size of its memory (`141GB`, `80GiB`).

    Raises:
        ValueError: neither.
    """
    reserved_bytes = CONTEXT_BYTES + (COLLECTIVES_BYTES if num_ranks > 1 else 0)
    key = re.sub(r"[\s_]|nvidia|geforce", "", text.lower()).replace("-80gb", "")
    if key in MEMORY_MIB:
        return Device(key, MEMORY_MIB[key] * MIB, reserved_bytes)
    size = _SIZE.fullmatch(text.strip())
    if size is not None:
        return Device(f"GPU of {text.strip()}", int(float(size[1]) * _UNITS[size[2].lower()]), reserved_bytes)
    close = difflib.get_close_matches(key, MEMORY_MIB, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(MEMORY_MIB)}"
    raise ValueError(f"--gpu: '{text}' is not known: {hint} (or give its memory, such as 80GiB)")
