"""Kernels that start before the one before them has ended (programmatic dependent launch, Hopper and later).

A chained kernel lets its successor start at once, and waits for the end of its predecessor before it reads anything
that a kernel wrote, or writes anything. Until then it may read constants. Each kernel waits for the
end of the one before, so an end implies the end of all before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._assembler import choose_assembler

choose_assembler()  # every module with kernels imports this one, before it compiles any


@triton.jit
def wait_for_predecessor(CHAINED: tl.constexpr):
    """First in a kernel."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]


MAX_CHAINED_ROWS = 256
"""With more rows a kernel is long beside a launch, and a successor's waiting programs would take room from it."""


def chain_options(tensor: Tensor, warps: int) -> dict[str, Any]:
    """What a launch of a kernel with a CHAINED argument takes. tensor: [rows, ...], what the kernel works on."""
    if tensor.is_cuda and tensor.shape[0] <= MAX_CHAINED_ROWS and _can_chain(tensor.device):
        return {"CHAINED": True, "launch_pdl": True, "num_warps": warps}
    return {"CHAINED": False, "num_warps": warps}


def grid(kernel: Any, *sizes: int) -> Any:
    """A kernel's launcher. Untyped: a constant of a kernel has another type inside it than for its caller."""
    return kernel[sizes]


def power_of_2(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(number - 1, 0).bit_length()


HOPPER_BYTES = 227 << 10
"""Of shared memory that a program can have on Hopper and the Blackwell of data centres; 99 KiB on GPUs for desktops."""


@cache
def shared_bytes(device: torch.device) -> int:
    """That a program can have; where there is no GPU, as on Hopper."""
    if device.type != "cuda":
        return HOPPER_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def _can_chain(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
