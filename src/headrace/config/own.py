"""Settings that only Headrace has; everything else keeps the reference's names and meanings."""

from __future__ import annotations

from typing import Literal

from headrace.config.base import ConfigModel, beta


class HeadraceArgs(ConfigModel):
    """Headrace's own keys, top level like all others."""

    max_queued_requests: int | None = beta(None, "Waiting requests above which new ones are refused (HTTP 429).", ge=0)
    max_queued_tokens: int | None = beta(None, "Waiting prompt tokens above which new requests are refused.", ge=0)
    request_timeout_s: float | None = beta(None, "Longest life of a request in seconds; null is unlimited.", gt=0)
    shutdown_timeout_s: float = beta(30.0, "Seconds that running requests get to finish on shutdown.", ge=0)
    stall_timeout_s: float = beta(60.0, "Seconds without a step, while requests run, after which it isn't ready.", gt=0)
    profile_dir: str | None = beta(None, "Existing folder for traces of the engine; null refuses to make any.")
    fast_start: bool = beta(False, "Answer at once: capture each CUDA graph when it is first needed, not before.")
    deterministic: bool = beta(
        False, "A request's tokens don't depend on what runs beside it or is cached; slower on GPUs, one rank."
    )
    max_step_s: float | None = beta(
        None, "About as long as a step may take for its prompts; null is 0.5 on a CPU, no bound on a GPU.", gt=0
    )
    engine_threads: int | None = beta(None, "CPU threads of the engine; null picks by the machine.", gt=0)
    model_impl: Literal["auto", "native", "transformers"] = beta(
        "auto", "Model code: native, the transformers library's, or native where it exists."
    )
