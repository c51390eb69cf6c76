"""Settings of image, video and audio inputs."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator, model_validator
from typing_extensions import Self

from headrace.config.base import ConfigModel, prototype
from headrace.config.errors import ConfigError, Problem
from headrace.config.kernels import MultimodalEncoderCudaGraphConfig

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def bytes_from_text(value: Any) -> Any:
    """A size such as `512MB` or `1GiB` in bytes; anything but text unchanged. ValueError if it is no size."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b?)\s*", value.lower())
    unit = match.group(2) if match else ""
    unit = unit + "b" if unit and not unit.endswith("b") else unit
    if match is None or unit not in _UNITS:
        raise ValueError(f"expected bytes or a size such as 512MB or 1GiB, got '{value}'")
    return int(float(match.group(1)) * _UNITS[unit])


class MultimodalConfig(ConfigModel):
    """Encoders of other modalities than text."""

    encoder_cuda_graph: dict[str, MultimodalEncoderCudaGraphConfig] | None = prototype(
        None, "CUDA graphs of encoders, by modality."
    )
    encoder_side_stream_max_ahead: int = prototype(0, "Items that may be encoded ahead on a side stream.", ge=0)
    encoder_cache_max_bytes: int = prototype(128 << 20, "Room for encoded items: bytes, or text such as 512MB.", ge=0)
    encoder_scheduling_policy: Literal["DISABLED", "DEFAULT", "EAGER"] = prototype(
        "DEFAULT", "When encoders run relative to the decoder."
    )
    video_pruning_rate: float | None = prototype(None, "Share of video tokens that are dropped.", ge=0, lt=1)

    @field_validator("encoder_cache_max_bytes", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Any:
        return bytes_from_text(value)

    @model_validator(mode="after")
    def _graphs_run_in_order(self) -> Self:
        if self.encoder_cuda_graph and self.encoder_side_stream_max_ahead > 0:
            raise ConfigError(Problem("encoder_side_stream_max_ahead", "must be 0 with encoder_cuda_graph"))
        return self
