"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; on the CPU what the machine, and the control group if there is one, leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _meminfo_available()
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def check_room(weight_bytes: int, device: torch.device) -> None:
    """Said before loading: a machine that runs out in the middle of it kills processes without a word.

    Raises:
        MemoryError: the weights are larger than what is free.
    """
    free = free_bytes(device)
    if weight_bytes > free:
        raise MemoryError(
            f"the weights take {weight_bytes:,} bytes and {free:,} bytes are free: free memory, or choose a smaller"
            " model or dtype"
        )


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo names no MemAvailable")


def _cgroup(name: str) -> int | None:
    """A number of the process's own control group (version 2), None without a limit."""
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
