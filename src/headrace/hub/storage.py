"""How many bits a stored weight takes, by the quantisation that a checkpoint or the user names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from headrace.config.on_load import fp8_bits, plain_layers
from headrace.hub.errors import ModelError
from headrace.hub.shape import PLAIN, Form, ModelShape, Storage, Weight

FP8_BLOCK_BITS = 8 + 32 / (128 * 128)
"""With a float32 scale for each 128 x 128 weights."""
BITS = {
    "fp8": FP8_BLOCK_BITS,
    "float8_e4m3fn": 8.0,
    "float8_e5m2": 8.0,
    "nvfp4": 4 + 8 / 16,
    "fp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
    "mxfp8": 8 + 8 / 32,
    "int8": 8.0,
    "int4": 4 + (16 + 4) / 128,
}
"""Of a weight, scales included: NVFP4 has an 8-bit scale for 16, the MX types one for 32, INT4 a scale and a zero
point for each group of 128."""
SCALE_BITS = 16
ZERO_BITS = 4


def quantised(name: str) -> Storage:
    """All products' weights in one of the dtypes of BITS. Embedding, head, norms and routers stay as they are."""
    return Storage(name, {"linear": BITS[name], "expert": BITS[name]})


def in_fp8_on_load(shape: ModelShape) -> ModelShape:
    """A plain checkpoint's under `force_dynamic_quantization`."""
    each = shape.parts_per_layer
    kept = plain_layers(len(shape.layers) // each)
    layers = tuple(
        replace(layer, weights=tuple(map(_plain, layer.weights))) if place // each in kept else layer
        for place, layer in enumerate(shape.layers)
    )
    bits = fp8_bits(shape.hidden_size)  # of the inputs that most weights have
    name = "fp8 at load" + (", but for the first and the last layer" if kept else "")
    return replace(shape, layers=layers, storage=Storage(name, {"linear": bits, "expert": bits}))


def _plain(weight: Weight) -> Weight:
    return weight if weight.form == "float32" else replace(weight, form="plain")


def stored_as(stated: Any, place: str) -> Storage:
    """What a config's `quantization_config` says.

    Raises:
        ModelError: a method that is not known.
    """
    if not stated:
        return PLAIN
    if not isinstance(stated, Mapping):
        raise ModelError(f"{place}: quantization_config must be an object, not {stated!r}")
    said = cast("Mapping[str, Any]", stated)
    method = str(said.get("quant_method") or "").replace("-", "_")
    if method == "mxfp4":  # gpt-oss: experts only
        return Storage("mxfp4 experts", {"expert": BITS["mxfp4"]})
    if method in ("compressed_tensors", "modelopt"):
        return _by_groups(said, method)
    bits = _bits_of_method(said, method)
    if bits is None:
        raise ModelError(f"{place}: quantization_config: the method {said.get('quant_method')!r} is not known here: "
                         "give the weights' type with --dtype")  # fmt: skip
    if said.get("expert_dtype") == "fp4":  # DeepSeek-V4
        return Storage(f"{method}, mxfp4 experts", {"linear": bits, "expert": BITS["mxfp4"]})
    return Storage(method, {"linear": bits, "expert": bits})


def _bits_of_method(said: Mapping[str, Any], method: str) -> float | None:
    if method in ("fp8", "fbgemm_fp8"):
        return BITS["fp8"]
    if method in ("awq", "gptq", "auto_round"):
        bits = int(said.get("bits") or said.get("w_bit") or 4)
        group = int(said.get("group_size") or said.get("q_group_size") or 128)
        return bits + (SCALE_BITS + ZERO_BITS) / group if group > 0 else bits
    if method == "bitsandbytes":
        return 4 + 32 / 64 if said.get("load_in_4bit") else 8.0
    return None


def _by_groups(said: Mapping[str, Any], method: str) -> Storage:
    """compressed-tensors and ModelOpt: the first group's weights, and what is left out of it."""
    algorithm = str(said.get("quant_algo") or "").lower()
    groups = cast("dict[str, dict[str, Any]]", said.get("config_groups") or {})
    nothing: dict[str, Any] = {}
    weights: dict[str, Any] = next((group.get("weights") or nothing for group in groups.values()), nothing)
    bits = float(weights.get("num_bits") or (4 if "fp4" in algorithm or "w4" in algorithm else 8))
    group_size = int(weights.get("group_size") or (16 if algorithm == "nvfp4" else 0))
    if group_size > 0:
        bits += (8 if weights.get("type", "float") == "float" and bits < 8 else SCALE_BITS) / group_size
    forms: dict[Form, float] = {"expert": bits}
    left_out = " ".join(str(name) for name in said.get("ignore") or said.get("exclude_modules") or ())
    if "attn" not in left_out:
        forms["linear"] = bits
    return Storage(f"{algorithm or method} ({bits:.4g} bits)", forms)
