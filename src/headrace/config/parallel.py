"""Settings of several ranks: how attention, experts and context are split, and who starts the processes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt, field_validator

from headrace.config.base import Choice, ConfigModel, beta, prototype


class AllReduceStrategy(Choice):
    """How partial sums of tensor-parallel ranks are added up."""

    AUTO = "AUTO"
    NCCL = "NCCL"
    UB = "UB"
    MINLATENCY = "MINLATENCY"
    ONESHOT = "ONESHOT"
    TWOSHOT = "TWOSHOT"
    LOWPRECISION = "LOWPRECISION"
    MNNVL = "MNNVL"
    NCCL_SYMMETRIC = "NCCL_SYMMETRIC"


class AttentionDpConfig(ConfigModel):
    """How requests are spread over ranks when attention is data parallel."""

    enable_balance: bool = beta(False, "Hold prefill back until the ranks have similar work.")
    timeout_iters: int = beta(50, "Steps that prefill may be held back for balance.", ge=0)
    batching_wait_iters: int = beta(10, "Steps to wait for more requests before an unbalanced step runs.", ge=0)
    enable_kv_cache_aware_routing: bool = beta(False, "Prefer the rank whose cache holds more of the prompt.")
    kv_cache_routing_load_balance_weight: float = beta(1.0, "Weight of load against cache hits in the score.", ge=0)
    kv_cache_routing_match_rate_threshold: float = beta(
        0.1, "Smallest matched share of a prompt that counts as a hit.", ge=0, le=1
    )
    kv_cache_routing_fair_share_multiplier: float = beta(
        2.0, "A rank above this multiple of its fair share of load gets no more requests for its hits.", gt=0
    )
    kv_cache_routing_cold_start_warmup: bool = beta(False, "Fill ranks evenly before hits are looked at.")
    kv_cache_routing_account_for_in_transfer: bool = beta(False, "Count requests whose blocks are still on the way.")
    kv_cache_routing_conversation_affinity: bool = beta(
        False, "Keep each conversation on one rank; goes before cache-aware routing."
    )
    kv_cache_routing_max_sessions: int = beta(65536, "Conversations that are remembered; the oldest goes first.", gt=0)
    kv_cache_routing_new_conv_placement: Literal["round_robin", "least_queued", "least_tokens"] = beta(
        "round_robin", "Where a new conversation starts."
    )


class CpConfig(ConfigModel):
    """Context parallelism: one sequence over several ranks."""

    cp_type: Literal["ULYSSES", "RING", "HELIX"] = prototype("ULYSSES", "Scheme that splits the sequence.")
    cp_size: PositiveInt | None = prototype(None, "Another spelling of context_parallel_size.")
    tokens_per_block: PositiveInt | None = prototype(None, "Block size of the split; under HELIX that of the KV cache.")
    use_nccl_for_alltoall: bool | None = prototype(None, "Exchange through NCCL; null means yes.")
    fifo_version: PositiveInt | None = prototype(None, "Version of the exchange buffer; null means 2.")

    @field_validator("cp_type", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value


class DwdpConfig(ConfigModel):
    """Data parallelism with weights spread over ranks and fetched ahead of use."""

    dwdp_size: int = prototype(1, "Ranks that share one copy of the weights.", ge=1)
    num_groups: int = prototype(1, "Groups of such ranks.", ge=1)
    num_experts_per_worker: int = prototype(0, "Experts that stay on a rank; 0 divides them evenly.", ge=0)
    num_prefetch_experts: int = prototype(0, "Experts fetched ahead of use.", ge=0)
    contention_opt: bool = prototype(False, "Order fetches so that ranks do not read from one peer together.")


class RayPlacementConfig(ConfigModel):
    """Where Ray puts the workers."""

    defer_workers_init: bool = prototype(False, "Start the workers later, from an asynchronous set-up call.")
    placement_groups: list[Any] | None = prototype(None, "Ray placement groups to use.", python_only=True)
    placement_bundle_indices: list[list[int]] | None = prototype(None, "Bundles to use of each placement group.")
    per_worker_gpu_share: float | None = prototype(None, "Share of a GPU that a worker asks Ray for.", gt=0, le=1)
