"""A model's config without its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from headrace.hub.aliases import ALIASES
from headrace.hub.config import merge_config, read_config, read_json, read_quant_config
from headrace.hub.errors import ModelError
from headrace.hub.outlines import find_outline, near_outline
from headrace.hub.source import is_hub_id, resolve_model


def find_config(
    name: str, *, revision: str | None = None, model_kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config of a model by alias, folder, .gguf file, config.json file, hub id or the name of an outline, as
    `read_config` gives it.

    No weights are needed, and of a hub model only the config is fetched.

    Raises:
        ModelError: nothing usable under that name. One line with the remedy.
    """
    outline = None if name in ALIASES else find_outline(name)
    if outline is not None:
        merge_config(outline.config, model_kwargs or {})
        return outline.config
    path = Path(name).expanduser()
    if name not in ALIASES and path.suffix == ".json" and path.is_file():
        return _from_file(path, model_kwargs)
    if name not in ALIASES and is_hub_id(name):
        return _from_file(_hub_file(name, revision), model_kwargs)
    near = None if name in ALIASES or path.exists() else near_outline(name)
    if near is not None:
        raise ModelError(f"no model {name!r}: did you mean {near!r}?")
    source = resolve_model(name, revision=revision)
    if source.kind == "gguf":
        return read_config(source, model_kwargs=model_kwargs)
    return _from_file(source.path / "config.json", model_kwargs)


def _from_file(path: Path, model_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    config = read_json(path)
    if not config.get("quantization_config"):
        quantised = (read_quant_config(path.parent) or {}).get("quantization")
        if isinstance(quantised, dict):
            config["quantization_config"] = {"quant_method": "modelopt", **cast("dict[str, Any]", quantised)}
    merge_config(config, model_kwargs or {})
    return config


def _hub_file(name: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"{name!r} is not a local path, and hub ids need huggingface_hub: pip install huggingface_hub,"
            " or give a folder or a config.json"
        ) from None
    download = cast("Any", huggingface_hub).hf_hub_download
    try:
        return Path(download(name, "config.json", revision=revision))
    except Exception as error:
        reason = str(error).strip().splitlines()
        cache = os.environ.get("HF_HOME") or "the Hugging Face cache"
        raise ModelError(
            f"the config of {name!r} is not in {cache} and can't be fetched"
            f" ({reason[0] if reason else type(error).__name__}): give its config.json"
        ) from None
