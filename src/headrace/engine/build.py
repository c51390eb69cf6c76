"""From a config to a model: which architecture it names, and the file that has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import plugins
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.port import Model


def build_model(config: Mapping[str, Any], factory: LayerFactory) -> Model:
    """The model of a Hugging Face config, its parameters not loaded yet.

    Raises:
        ValueError: an architecture without a file in the models room, or a config that it can't be built from.
    """
    hf_config = HfConfig(config)
    return find_architecture(hf_config.model_type if "model_type" in hf_config else None)(hf_config, factory)


def find_architecture(model_type: str | None) -> Any:
    """The model class that serves `model_type`: the file of that name, or the one that lists it in `model_types`."""
    if model_type is None:
        raise ValueError("config.json names no architecture (model_type): is it the config of a language model?")
    names = plugins.names("models")
    if model_type in names:
        return plugins.load("models", model_type)
    for name in names:
        architecture = plugins.load("models", name)
        if model_type in architecture.model_types:
            return architecture
    raise ValueError(
        f"architecture {model_type!r} is not known: known are {', '.join(known_model_types())};"
        " choose a model of one of them, or install a package that adds it"
    )


def known_model_types() -> tuple[str, ...]:
    """Every `model_type` that some file of the models room serves."""
    served = (plugins.load("models", name).model_types for name in plugins.names("models"))
    return tuple(sorted(model_type for types in served for model_type in types))
