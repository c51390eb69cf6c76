"""Which ptxas Triton's kernels are assembled with.

Release 12.8, which Triton 3.6 and 3.7 take for GPUs before Blackwell, loses the first write of a register in some
kernels with tensor core products, whose descriptors of shared memory then point anywhere: wrong numbers, or an illegal
access. The same wheels have a newer one for Blackwell, which assembles the same code right, and Triton 3.9 takes 12.9
for all.
"""

from __future__ import annotations

import os

import torch

__all__ = ["choose_assembler"]

Release = tuple[int, int]

FAULTY: Release = (12, 8)
VARIABLE = "TRITON_PTXAS_PATH"


def choose_assembler() -> None:
    """Set what Triton reads before it compiles, unless a user has."""
    if torch.version.cuda is None or os.environ.get(VARIABLE):
        return
    from triton import knobs

    usual, newer = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    if is_better(release_of(newer.version), than=release_of(usual.version), cuda=release_of(torch.version.cuda)):
        os.environ[VARIABLE] = newer.path


def is_better(release: Release, *, than: Release, cuda: Release) -> bool:
    """cuda: torch's, whose driver runs what any release of the same major number, or an older one, has made."""
    return than == FAULTY and release > FAULTY and release[0] <= cuda[0]


def release_of(version: str) -> Release:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
