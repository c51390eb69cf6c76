"""The public names once more, under the module that TensorRT-LLM scripts import their configs from."""

from __future__ import annotations

from typing import Any

import headrace

__all__ = [*headrace.__all__]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return getattr(headrace, name)


def __dir__() -> list[str]:
    return dir(headrace)
