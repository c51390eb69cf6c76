"""What a server process counts for itself, beside the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Counters"]


@dataclass
class Counters:
    """Since the start."""

    accepted: int = 0
    rejected: int = 0
    disconnected: int = 0
    entering: int = 0
    """Now: requests that are being prepared."""
    warned: set[str] = field(default_factory=set[str])
    """Unknown field names that have been logged."""
