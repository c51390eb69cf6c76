"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From what is as it should be to what will fail; only a problem is an exit code."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    """`topic.name`, the same in every report; docs/doctor.md lists them."""
    level: Level
    message: str
    remedy: str = ""
    """What to do about it; there is one for every warning and every problem."""

    def __post_init__(self) -> None:
        assert self.remedy or self.level in ("ok", "note"), f"{self.check}: a {self.level} needs a remedy"
