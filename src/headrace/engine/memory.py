"""How much memory this process may still take."""

from __future__ import annotations

import torch

from headrace.config.machine import free_memory_bytes


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; on the CPU what the machine, and the control group if there is one, leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory_bytes()


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
