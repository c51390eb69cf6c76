"""Settings of the scheduler: which requests are admitted, in which order, and how prompts are cut."""

from __future__ import annotations

from typing import Literal

from headrace.config.base import Choice, ConfigModel, prototype


class CapacitySchedulerPolicy(Choice):
    """When a waiting request may start, given the KV blocks that are free."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    """Start as soon as the next step fits; a running request may have to be paused and resumed later."""
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    """Start only when the request fits to its very end, so that nothing that runs is ever paused."""
    STATIC_BATCH = "STATIC_BATCH"
    """Start a whole batch together and the next one when all of it has ended."""


class ContextChunkingPolicy(Choice):
    """How the token budget of a step is dealt out among prompts that are being computed."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"
    FORCE_CHUNK = "FORCE_CHUNK"


class WaitingQueuePolicy(Choice):
    """Order of the waiting queue."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class BatchingType(Choice):
    """Batching mode of built engines; batching is always in flight here."""

    STATIC = "STATIC"
    INFLIGHT = "INFLIGHT"


class DynamicBatchConfig(ConfigModel):
    """Run-time tuning of batch limits, of built engines only."""

    enable_batch_size_tuning: bool = prototype(True, "Adjust the batch size limit from recent load.")
    enable_max_num_tokens_tuning: bool = prototype(False, "Adjust the token budget of a step from recent load.")
    dynamic_batch_moving_average_window: int = prototype(128, "Number of steps in the moving average.", gt=0)


class SchedulerConfig(ConfigModel):
    """Which requests run in a step."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = prototype(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, "When a waiting request may start, given the free KV blocks."
    )
    context_chunking_policy: ContextChunkingPolicy | None = prototype(
        None, "How chunked prefill deals out a step's token budget; null serves prompts in order of arrival."
    )
    dynamic_batch_config: DynamicBatchConfig | None = prototype(
        None, "Run-time tuning of batch limits; it belonged to built engines."
    )
    waiting_queue_policy: WaitingQueuePolicy = prototype(
        WaitingQueuePolicy.FCFS, "Order of waiting requests: by arrival, or by their priority first."
    )
    use_python_scheduler: bool = prototype(False, "Accepted for old files: there is one scheduler.")
    enable_prefix_aware_scheduling: bool = prototype(
        True, "Hold back a request for a step when a running one is about to make its prefix reusable."
    )


class AgentTreeConfig(ConfigModel):
    """Parameters of the AgentTree order."""

    agent_percentage: float = prototype(
        0.0, "Share of a batch kept for agent requests; -1 draws at random.", ge=-1, le=1
    )
    agent_types: list[str] | None = prototype(None, "Agent types that belong to the tree; null takes all.")
    agent_inflight_seq_num: int = prototype(2**31 - 1, "Most agent sequences in flight.", gt=0)


class ReorderRequestPolicyConfig(ConfigModel):
    """A policy that reorders the waiting queue."""

    policy_name: Literal["AgentTree"] | None = prototype(None, "Name of the policy; null keeps the queue's order.")
    policy_args: AgentTreeConfig = prototype(AgentTreeConfig, "Parameters of the policy.")
