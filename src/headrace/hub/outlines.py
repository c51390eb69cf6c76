"""Models that can be planned by name without their config: configs written from published numbers, in `outlines/`."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outline", "find_outline", "near_outline", "outline_names"]

FOLDER = Path(__file__).with_name("outlines")


@dataclass(frozen=True, slots=True)
class Outline:
    """One model's sizes."""

    name: str
    written_from: str
    """What its numbers are, for whoever reads a plan."""
    config: dict[str, Any]
    """As a config.json has it."""


def outline_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find_outline(name: str) -> Outline | None:
    """Whatever the case of the letters; None if there is none, or a file or folder of that name."""
    wanted = name.lower()
    if wanted not in outline_names() or Path(name).exists():
        return None
    stated = json.loads((FOLDER / f"{wanted}.json").read_text())
    return Outline(wanted, stated["written_from"], stated["config"])


def near_outline(name: str) -> str | None:
    """The outline that a name without one probably means: the name begins like it, or is spelt almost so."""
    wanted = name.lower().replace("_", "-")
    begun = [each for each in outline_names() if each.startswith(wanted)] if wanted else []
    close = begun or difflib.get_close_matches(wanted, outline_names(), n=1, cutoff=0.8)
    return close[0] if close else None
