"""Settings of moving KV blocks between processes, and of shrinking the ones that wait."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from headrace.config.base import Choice, ConfigModel, prototype
from headrace.config.errors import ConfigError, Problem


class TransceiverBackend(Choice):
    """Library that carries KV blocks between machines."""

    DEFAULT = "DEFAULT"
    UCX = "UCX"
    NIXL = "NIXL"
    MOONCAKE = "MOONCAKE"
    MPI = "MPI"


class CacheTransceiverConfig(ConfigModel):
    """KV transfer between context and generation servers."""

    backend: TransceiverBackend | None = prototype(None, "Library that carries the blocks; null turns transfer off.")
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = prototype(
        "auto", "Implementation to use; both sides have to agree. null is CPP."
    )
    max_tokens_in_buffer: int | None = prototype(
        None, "Size of the transfer buffer in tokens; at least the longest prompt is advised.", gt=0
    )
    kv_transfer_timeout_ms: int | None = prototype(60000, "A transfer that takes longer has failed; null waits.", gt=0)
    kv_transfer_sender_future_timeout_ms: int | None = prototype(1000, "Time slice in which a sender waits.", gt=0)
    kv_transfer_poll_interval_ms: int | None = prototype(5000, "Period in which transfers are checked.", gt=0)
    kv_cache_bounce_size_mb: int = prototype(0, "Size of the bounce buffer; 0 is none.", ge=0)
    enable_pipelined_transfer: bool = prototype(False, "Send each prefill chunk while later chunks are computed.")
    agent_bounce_buffer_enable: bool = prototype(False, "Let the transfer agent use a bounce buffer of its own.")
    agent_bounce_params: dict[str, Any] | None = prototype(None, "Parameters of that buffer.")

    @field_validator("transceiver_runtime", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {"cpp": "CPP", "python": "PYTHON", "auto": "auto"}.get(value.lower(), value)

    @model_validator(mode="after")
    def _pipelining_is_possible(self) -> Self:
        if not self.enable_pipelined_transfer:
            return self
        if self.backend not in (TransceiverBackend.NIXL, TransceiverBackend.DEFAULT):
            raise ConfigError(Problem("enable_pipelined_transfer", "needs backend NIXL"))
        if self.transceiver_runtime in ("CPP", None):
            raise ConfigError(Problem("enable_pipelined_transfer", "needs transceiver_runtime PYTHON or auto"))
        if self.kv_cache_bounce_size_mb:
            raise ConfigError(Problem("enable_pipelined_transfer", "needs kv_cache_bounce_size_mb 0"))
        return self


CONNECTOR_PRESETS = ("lmcache", "lmcache-mp", "kvbm", "mooncake-store")


class KvCacheConnectorConfig(ConfigModel):
    """An external block store, by preset or by the import path of its two sides."""

    connector: str | None = prototype(None, f"Preset: {', '.join(CONNECTOR_PRESETS)}.")
    connector_module: str | None = prototype(None, "Import path of the module that holds both classes.")
    connector_scheduler_class: str | None = prototype(None, "Class of the scheduler's side.")
    connector_worker_class: str | None = prototype(None, "Class of the worker's side.")
    server_url: str | None = prototype(None, "Address of the store, where it has one.")

    @model_validator(mode="after")
    def _names_are_complete(self) -> Self:
        if self.connector is not None:
            if self.connector not in CONNECTOR_PRESETS:
                raise ConfigError(Problem("connector", f"must be one of {', '.join(CONNECTOR_PRESETS)}"))
            return self
        for name in ("connector_module", "connector_scheduler_class", "connector_worker_class"):
            if not getattr(self, name):
                raise ConfigError(Problem(name, "required unless connector names a preset"))
        return self


class ColdPageQuantConfig(ConfigModel):
    """Quantise blocks that live on host or disk."""

    algorithm: Literal["quantization_for_cold_page"] = prototype("quantization_for_cold_page", "Kind of compression.")
    quant: Literal["nvfp4"] = prototype("nvfp4", "Form of the stored blocks.")
    scale_checkpoint_path: str | None = prototype(None, "File with scales; null computes them.")


class TriAttentionConfig(ConfigModel):
    """Keep only the most useful tokens of a long context."""

    algorithm: Literal["triattention"] = prototype("triattention", "Kind of compression.")
    eviction_mode: Literal["union", "per_head", "per_layer_perhead"] = prototype("union", "What heads agree on.")
    normalize_scores: bool = prototype(True, "Normalise scores before they are compared.")
    budget: int = prototype(2048, "Tokens that are kept.", gt=0)
    beta: int = prototype(128, "Steps between evictions.", gt=0)
    calibration_path: str = prototype(..., "File with the calibration of the scores.", min_length=1)


KvCacheCompressionConfig = Annotated[ColdPageQuantConfig | TriAttentionConfig, Field(discriminator="algorithm")]
