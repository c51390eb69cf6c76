"""How a checkpoint wants its hidden states made into one embedding."""

from __future__ import annotations

from typing import Literal

from headrace.hub.config import read_json
from headrace.hub.source import ModelSource

__all__ = ["stated_pooling"]

FOLDER = "1_Pooling"
"""Where sentence-transformers keeps it (its documentation, "Pooling": one flag a kind in config.json)."""


def stated_pooling(source: ModelSource) -> Literal["last", "mean"] | None:
    """None: the files say nothing, or name a kind that decoder models have no use for."""
    path = source.path / FOLDER / "config.json"
    if source.kind == "gguf" or not path.is_file():
        return None
    stated = read_json(path)
    if stated.get("pooling_mode_lasttoken"):
        return "last"
    return "mean" if stated.get("pooling_mode_mean_tokens") else None
