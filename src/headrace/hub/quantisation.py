"""What a checkpoint's weights are stored as, in one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headrace.hub.config import read_json, read_quant_config, stated_quantisation
from headrace.hub.errors import ModelError
from headrace.hub.source import ModelSource

__all__ = ["quantisation_name"]


def quantisation_name(source: ModelSource) -> str:
    """As the checkpoint calls it (FP8, NVFP4, awq, ...), `gguf` for any GGUF file, "" for plain floats."""
    if source.kind == "gguf":
        return "gguf"
    try:
        stated = (read_quant_config(source.path) or {}).get("quantization")
        stated = stated or stated_quantisation(read_json(source.path / "config.json"))
    except ModelError:  # an engine that isn't of these files
        return ""
    if not isinstance(stated, Mapping):
        return ""
    found = cast("Mapping[str, Any]", stated)
    return str(found.get("quant_algo") or found.get("quant_method") or "")
