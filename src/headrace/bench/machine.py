"""What a report says about the machine, without torch."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

__all__ = ["busy_note", "cpu_name", "peak_rss_bytes"]

BUSY_SHARE = 0.5
"""Of the cores: a higher load average before a measurement is others' work."""


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def busy_note() -> str:
    """What to know before anything is measured on a machine that others use; "" where nobody does."""
    load, num_cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= BUSY_SHARE * num_cpus:
        return ""
    return f"this machine is busy (load average {load:.1f} on {num_cpus} cores): expect slower and varying figures"


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
