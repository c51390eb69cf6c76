"""What `force_dynamic_quantization` makes of plain weights at load: the engine does it, a plan counts it."""

from __future__ import annotations

MIN_LAYERS = 8
"""Of a model whose first and last layer stay as they are."""
SCALE_BITS = 32


def plain_layers(num_layers: int) -> tuple[int, ...]:
    """The first and the last layer, whose errors weigh most (Llama Team 2024, section 6.2); none of a model with few
    layers."""
    return (0, num_layers - 1) if num_layers >= MIN_LAYERS else ()


def fp8_bits(in_features: int) -> float:
    """Of an element of a weight in FP8, with its part of the scale that each output has."""
    return 8 + SCALE_BITS / max(in_features, 1)
