"""The attention backends of one engine: one for each kind of attention that its model has."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from headrace import plugins
from headrace.attention import _flashinfer_plan as flashinfer_plan
from headrace.attention._flashinfer_rules import RULES, Rule, min_query
from headrace.attention.port import AttentionBackend, AttentionSpec, CacheSpec
from headrace.engine.groups import WHOLE, Reach, shared_layers
from headrace.kernels import _fla as fla
from headrace.layers.experts import RoutedExperts
from headrace.layers.port import Layer, RecurrentLayer
from headrace.layers.weights import Loadable
from headrace.log import phase
from headrace.quant.none import Dense

log = logging.getLogger("headrace.engine")

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
    """For a configured `attn_backend`: TensorRT-LLM's names mean the fastest one of our own here, VANILLA the oracle.
    AUTO is this too, but for the layers that `open_backends` finds a measured rule for.

    Args:
        is_fixed: `deterministic`; the one of CPUs is so in any case.

    Raises:
        ValueError: FLASHINFER, and no GPU.
    """
    if wanted == "FLASHINFER":
        if device.type != "cuda":
            raise ValueError(f"attn_backend FLASHINFER needs an NVIDIA GPU, not a {device.type}: set it to AUTO")
        return "flashinfer"
    if is_fixed:
        return "cpu" if device.type == "cpu" else "fixed"
    if wanted == "VANILLA":
        return ORACLE
    return "cpu" if device.type == "cpu" else "triton"


def open_backends(
    wanted: str,
    layers: Sequence[Layer | RecurrentLayer],
    *,
    reach: Reach = WHOLE,
    device: torch.device,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_fixed: bool = False,
    rules: Sequence[Rule] = RULES,
) -> Backends:
    """The backends of an engine, and what has to be compiled before its first step.

    Args:
        wanted: `attn_backend`.
        reach: as the layers' groups were made with.
        is_fixed: `deterministic`.
        rules: what AUTO chooses by.

    Raises:
        ValueError: FLASHINFER is wanted, and isn't there or can't compute one of these layers; or HEADRACE_FLA is
            `always`, and fla-core isn't there.
    """
    if device.type == "cuda" and any(isinstance(layer, RecurrentLayer) for layer in layers):
        fla.check()
    implementation = implementation_of(wanted, device, is_fixed=is_fixed)
    specs = _specs(layers, reach)
    own = [spec for spec in specs.values() if isinstance(spec, AttentionSpec)]
    is_asked_for = implementation == "flashinfer"
    if is_asked_for:
        _check_flashinfer(specs, dtype=dtype, kv_dtype=kv_dtype)
    elif wanted != "AUTO" or implementation != "triton" or not _has_rule(own, rules, device, dtype, kv_dtype):
        return Backends(implementation)
    try:
        backend = plugins.load("attention", "flashinfer")(rules=None if is_asked_for else rules)
        with phase("loading FlashInfer's kernels"):
            backend.prepare(own, device=device, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)
    except ValueError as error:
        if is_asked_for:
            raise
        log.info("attn_backend AUTO: prompts stay with the Triton kernels: %s", error)
        return Backends(implementation)
    return Backends("triton", chosen=[backend])


def _specs(layers: Sequence[Layer | RecurrentLayer], reach: Reach) -> dict[int, CacheSpec]:
    """By layer, of those that attend, as they will."""
    shared = shared_layers(layers)
    stated = {index: None if isinstance(layer, RecurrentLayer) else layer.spec for index, layer in enumerate(layers)}
    return {index: reach.of(shared.get(index, index), spec) for index, spec in stated.items() if spec is not None}


def _has_rule(
    specs: Sequence[AttentionSpec],
    rules: Sequence[Rule],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> bool:
    """Whether one of the layers was measured to be faster with FlashInfer."""
    capability = torch.cuda.get_device_capability(device)
    return any(
        flashinfer_plan.unsupported(spec, dtype=dtype, kv_dtype=kv_dtype) is None
        and min_query(rules, spec, kv_dtype=kv_dtype, capability=capability) is not None
        for spec in specs
    )


def _check_flashinfer(specs: Mapping[int, CacheSpec], *, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raises: ValueError: a layer that it can't compute."""
    for index, spec in specs.items():
        if isinstance(spec, AttentionSpec):
            found = flashinfer_plan.unsupported(spec, dtype=dtype, kv_dtype=kv_dtype)
        else:
            found = f"attention of the kind {spec.kind}"
        if found is not None:
            raise ValueError(f"attn_backend FLASHINFER can't compute {found}, as layer {index} has: set it to AUTO")


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
