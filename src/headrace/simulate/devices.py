"""Peak rates of devices by name, from their makers' data sheets: dense bfloat16, and memory."""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Peak:
    flops: float
    """Operations a second in bfloat16, without sparsity."""
    bytes_per_s: float
    link_bytes_per_s: float
    """Of one device to its neighbours, one way."""
    has_fp8: bool = False


PEAKS = {
    "a10g": Peak(70 * TERA, 0.6 * TERA, 32e9),
    "l4": Peak(121 * TERA, 0.3 * TERA, 32e9, True),
    "a40": Peak(149.7 * TERA, 0.696 * TERA, 56e9),
    "l40": Peak(181 * TERA, 0.864 * TERA, 32e9, True),
    "l40s": Peak(362 * TERA, 0.864 * TERA, 32e9, True),
    "a100-40gb": Peak(312 * TERA, 1.555 * TERA, 300e9),
    "a100": Peak(312 * TERA, 2.039 * TERA, 300e9),
    "h20": Peak(148 * TERA, 4.0 * TERA, 450e9, True),
    "h100": Peak(989 * TERA, 3.35 * TERA, 450e9, True),
    "h100nvl": Peak(835 * TERA, 3.9 * TERA, 300e9, True),
    "gh200": Peak(989 * TERA, 4.0 * TERA, 450e9, True),
    "h200": Peak(989 * TERA, 4.8 * TERA, 450e9, True),
    "b200": Peak(2250 * TERA, 8.0 * TERA, 900e9, True),
    "gb200": Peak(2500 * TERA, 8.0 * TERA, 900e9, True),
    "b300": Peak(2250 * TERA, 8.0 * TERA, 900e9, True),
    "gb300": Peak(2500 * TERA, 8.0 * TERA, 900e9, True),
}
CPU = Peak(0.2 * TERA, 20e9, 5e9)
"""No more than an order of magnitude: a CPU's figures come from a calibration."""


def peak_of(device: str) -> Peak:
    """Raises ValueError: the rates of this device are not known."""
    if device.startswith("cpu"):
        return CPU
    if device not in PEAKS:
        raise ValueError(f"--gpu: the speed of {device!r} is not known here: use one of {', '.join(PEAKS)}")
    return PEAKS[device]
