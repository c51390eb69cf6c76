"""Where fetched models live."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The folder of fetched models: `HEADRACE_CACHE`, or `headrace` in the user's cache folder. May not exist yet."""
    chosen = os.environ.get("HEADRACE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"
