"""From a config to a model: which architecture it names, and the file that has it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from headrace import plugins
from headrace.layers.experts import RoutedExperts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.port import Model
from headrace.models import _transformers
from headrace.quant.mxfp4 import Mxfp4
from headrace.quant.mxfp4_packed import Mxfp4Packed

log = logging.getLogger("headrace.engine")


def build_model(config: Mapping[str, Any], factory: LayerFactory, *, impl: str = "auto") -> Model:
    """The model of a Hugging Face config, its parameters not loaded yet.

    Args:
        impl: `model_impl`.

    Raises:
        ValueError: an architecture that nothing here runs, or a config that it can't be built from.
    """
    hf_config = HfConfig(config)
    model_type = hf_config.model_type if "model_type" in hf_config else None
    architecture = find_architecture(model_type, impl=impl)
    model: Model = architecture(hf_config, factory)
    if model.has_experts and not architecture.reads_mxfp4:
        _check_experts(model, hf_config.model_type)
    return model


def _check_experts(model: Model, model_type: str) -> None:
    """Raises: ValueError: experts stored in a form whose tensors' names the model's file doesn't know."""
    experts = [module for module in model.weight_map().modules if isinstance(module, RoutedExperts)]
    for name, recipe in (pair for module in experts for pair in module.recipes.items()):
        if isinstance(recipe, Mxfp4 | Mxfp4Packed):
            raise ValueError(
                f"config.json: quantization_config: {name} in MXFP4 is not served for {model_type}: use its FP8 or"
                " unquantised checkpoint"
            )


class Servable(Collection[str]):
    """The model types that can be built; it lists those with a file in the models room."""

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.native = known_model_types()

    def __contains__(self, model_type: object) -> bool:
        if self.impl != "transformers" and model_type in self.native:
            return True
        return self.impl != "native" and _transformers.is_known(str(model_type))

    def __iter__(self) -> Iterator[str]:
        return iter(self.native)

    def __len__(self) -> int:
        return len(self.native)


def find_architecture(model_type: str | None, *, impl: str = "auto") -> Any:
    """What builds a model of `model_type`: the file of that name, the one that lists it in `model_types`, or, when
    there is none or `impl` asks for it, the transformers library."""
    if model_type is None:
        raise ValueError("config.json names no architecture (model_type): is it the config of a language model?")
    if impl == "transformers":
        return _transformers.HostedModel
    names = plugins.names("models")
    if model_type in names:
        return plugins.load("models", model_type)
    for name in names:
        architecture = plugins.load("models", name)
        if model_type in architecture.model_types:
            return architecture
    if impl == "auto" and _transformers.is_known(model_type):
        log.info("%s has no file of its own here: the transformers library runs it over the paged cache", model_type)
        return _transformers.HostedModel
    raise ValueError(
        f"architecture {model_type!r} is not known: known are {', '.join(known_model_types())};"
        " choose a model of one of them, or install a package that adds it"
    )


def known_model_types() -> tuple[str, ...]:
    """Every `model_type` that some file of the models room serves."""
    served = (plugins.load("models", name).model_types for name in plugins.names("models"))
    return tuple(sorted(model_type for types in served for model_type in types))
