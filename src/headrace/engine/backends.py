"""The attention backends of one engine: one for each kind of attention that its model has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace import plugins
from headrace.attention.port import AttentionBackend

ORACLE = "torch"


class Backends:
    """By kind, loaded on first use."""

    def __init__(self, implementation: str = ORACLE, *, chosen: Sequence[AttentionBackend] = ()) -> None:
        """
        Args:
            implementation: what the files are named after: `cpu`, `triton` or `torch`. A kind without a file of that
                name has the oracle's.
            chosen: instead of the files of their kinds.
        """
        self._implementation = implementation
        self._loaded = {backend.kind: backend for backend in chosen}

    def of(self, kind: str) -> AttentionBackend:
        if kind not in self._loaded:
            prefix = "" if kind == "heads" else f"{kind}_"
            name = prefix + self._implementation
            known = name in plugins.names("attention")
            self._loaded[kind] = plugins.load("attention", name if known else prefix + ORACLE)()
        return self._loaded[kind]

    def names(self, kinds: Sequence[str]) -> str:
        """Of the classes, for what is named by all that computes it."""
        return ", ".join(type(self.of(kind)).__name__ for kind in sorted(set(kinds)))


def implementation_of(wanted: str, device: torch.device) -> str:
    """For a configured `attn_backend`: TensorRT-LLM's names mean the fastest one here, VANILLA the oracle."""
    if wanted == "VANILLA":
        return ORACLE
    return "cpu" if device.type == "cpu" else "triton"
