"""Which ptxas Triton's kernels are assembled with.

Release 12.8, which Triton 3.6 and 3.7 take for GPUs before Blackwell, loses the first write of a register in some
kernels with tensor core products, whose descriptors of shared memory then point anywhere: wrong numbers, or an illegal
access. 12.9, which 3.8 and 3.9 take, is reported to overwrite inputs of such products that are still read, until 13.3
(Triton's pull request 11781). The same wheels have a newer one, for Blackwell.
"""

from __future__ import annotations

import logging
import os

import torch

__all__ = ["choose_assembler"]

log = logging.getLogger("headrace.engine")

Release = tuple[int, int]

FAULTY: Release = (12, 8)
VARIABLE = "TRITON_PTXAS_PATH"


def choose_assembler() -> None:
    """Set what Triton reads before it compiles, unless a user has."""
    if torch.version.cuda is None or os.environ.get(VARIABLE):
        return
    try:
        from triton import knobs

        usual, newer = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
        releases = release_of(usual.version), release_of(newer.version)
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return  # another Triton, with one assembler: it takes that
    if is_better(releases[1], than=releases[0], cuda=release_of(torch.version.cuda)):
        os.environ[VARIABLE] = newer.path
    elif releases[0] == FAULTY:
        log.warning(
            "kernels are assembled by ptxas 12.8, which miscompiles some: set %s to a newer one (of CUDA 12.9, say)",
            VARIABLE,
        )


def is_better(release: Release, *, than: Release, cuda: Release) -> bool:
    """cuda: torch's, whose driver runs what any release of the same major number, or an older one, has made."""
    if release <= than or release[0] > cuda[0]:
        return False
    return than == FAULTY or release >= (13, 3) > than


def release_of(version: str) -> Release:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
