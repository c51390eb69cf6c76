"""The attention backends of one engine: one for each kind of attention that its model has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace import plugins
from headrace.attention.port import AttentionBackend
from headrace.layers.experts import RoutedExperts
from headrace.layers.port import Layer, RecurrentLayer
from headrace.layers.weights import Loadable
from headrace.quant.none import Dense

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


def implementation_of(wanted: str, device: torch.device, *, is_fixed: bool = False) -> str:
    """For a configured `attn_backend`: TensorRT-LLM's names mean the fastest one here, VANILLA the oracle.

    Args:
        is_fixed: `deterministic`; the one of CPUs is so in any case.
    """
    if is_fixed:
        return "cpu" if device.type == "cpu" else "fixed"
    if wanted == "VANILLA":
        return ORACLE
    return "cpu" if device.type == "cpu" else "triton"


def check_fixed(layers: Sequence[Layer], modules: Sequence[Loadable], device: torch.device) -> None:
    """For `deterministic`.

    Args:
        modules: of the weight map.

    Raises:
        ValueError: a layer whose result for a token depends on its chunk or on the rows beside it.
    """
    kinds = {"heads" if layer.spec is None else layer.spec.kind for layer in layers}
    names = sorted(kinds - {"heads"})
    if any(isinstance(layer, RecurrentLayer) for layer in layers):
        names.append("recurrent")
    if names:
        raise ValueError(
            f"deterministic: true is for attention over heads only, and this model has {', '.join(names)} layers"
        )
    if device.type != "cpu":
        return
    experts = (module.recipes for module in modules if isinstance(module, RoutedExperts))
    for name, recipe in (pair for recipes in experts for pair in recipes.items()):
        if not isinstance(recipe, Dense):
            raise ValueError(
                f"deterministic: true needs experts in 16 or 32 bits on a CPU, and {name} is stored as"
                f" {type(recipe).__name__}: use an unquantised checkpoint, or a GPU"
            )
