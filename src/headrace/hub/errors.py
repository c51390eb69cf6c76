"""The one error of this room."""

from __future__ import annotations

__all__ = ["ModelError"]


class ModelError(ValueError):
    """A model can't be found, read or trusted. The message is one line: what is wrong and what to do."""
