"""Settings of the KV cache: how much memory, which blocks are kept, where else they may live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator, model_validator
from typing_extensions import Self

from headrace.config.base import ConfigModel, deprecated, prototype, stable
from headrace.config.errors import ConfigError, Problem
from headrace.config.model import dtype_name
from headrace.types import DEFAULT_PRIORITY


def window_of(layer: int, own: int | None, *, windows: Sequence[int], longest: int) -> int | None:
    """Tokens that a query of a layer sees under `max_attention_window`; None is everything.

    No layer sees farther than its model lets it (`own`), and a window that holds the longest sequence is none.
    """
    if not windows:
        return own
    limit = windows[layer % len(windows)]
    if limit >= longest:
        return own
    return limit if own is None else min(own, limit)


class BlockReuseConfig(ConfigModel):
    """Which blocks of a finished request stay findable."""

    policy: Literal["all_reusable", "per_request", "per_conversation"] = prototype(
        "all_reusable", "Keep every block, only those a request marks, or the last turns of each conversation."
    )
    max_num_turns: int = prototype(1, "Turns kept per conversation under per_conversation.", gt=0)
    swa_endpoint_rewind_tokens: int = prototype(
        0, "Tokens before the end of a turn that sliding-window layers keep reusable as well.", ge=0
    )


class MambaStateConfig(ConfigModel):
    """When the state of recurrent layers is kept, so that a prefix can be resumed there."""

    periodic_snapshot_interval: int = prototype(0, "Tokens between snapshots; 0 takes none.", ge=0)
    additional_snapshot_offsets_from_start: list[PositiveInt] = prototype(
        [], "Extra positions, from the prompt's start."
    )
    additional_snapshot_offsets_from_end: list[NonNegativeInt] = prototype([], "Extra positions, back from its end.")
    enable_branch_snapshot: bool = prototype(False, "Also where a prompt leaves a known prefix.")

    @property
    def has_extra_snapshots(self) -> bool:
        """Whether snapshots are wanted beside the periodic ones."""
        return bool(
            self.additional_snapshot_offsets_from_start
            or self.additional_snapshot_offsets_from_end
            or self.enable_branch_snapshot
        )


class KVEventsConfig(ConfigModel):
    """A publisher that streams cache events to other processes."""

    enable_kv_cache_events: bool = prototype(False, "Publish events.")
    publisher: Literal["null", "zmq"] | None = prototype(None, "Transport; unset means zmq once events are enabled.")
    endpoint: str = prototype("tcp://*:5557", "Address that events are published on.")
    replay_endpoint: str | None = prototype(None, "Address where a subscriber asks for events it missed.")
    buffer_steps: int = prototype(10000, "Batches of events kept for replay.", ge=0)
    hwm: int = prototype(100000, "Messages queued for a slow subscriber before it loses some.", ge=0)
    max_queue_size: int = prototype(100000, "Events queued before the publisher.", ge=0)
    topic: str = prototype("", "Topic that events are published under.")


class TokenRangeRetentionConfig(ConfigModel):
    """Priority of the blocks of one range of prompt tokens."""

    token_start: int = stable(..., "First token of the range.", ge=0)
    token_end: int | None = stable(None, "Token after the last one; null is the end of the prompt.", gt=0)
    priority: int = stable(..., "0 (evicted first) to 100 (evicted last).", ge=0, le=100)
    duration_ms: float | None = stable(None, "How long the priority holds; null is for ever.", gt=0)

    def __init__(self, *values: Any, **named: Any) -> None:
        """Scripts pass the four values by position as well as by name."""
        super().__init__(**dict(zip(type(self).model_fields, values, strict=False)), **named)

    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.token_end is not None and self.token_end <= self.token_start:
            raise ConfigError(Problem("token_end", f"must be greater than token_start ({self.token_start})"))
        return self


class KvCacheRetentionConfig(ConfigModel):
    """How long the blocks of one request should stay; given with a request."""

    token_range_retention_configs: list[TokenRangeRetentionConfig] = stable([], "Priorities by range of the prompt.")
    decode_retention_priority: int = stable(DEFAULT_PRIORITY, "Priority of generated tokens.", ge=0, le=100)
    decode_duration_ms: float | None = stable(None, "How long that priority holds; null is for ever.", gt=0)
    transfer_mode: Literal["DRAM", "GDS", "POSIX", "POSIX_DEBUG_FALLBACK"] = prototype("DRAM", "Unused.")
    directory: str = prototype("", "Unused.")


class KvCacheConfig(ConfigModel):
    """The KV cache of one rank."""

    enable_block_reuse: bool = stable(True, "Reuse the blocks of a shared prompt prefix across requests.")
    max_tokens: int | None = stable(None, "Capacity in tokens; the smallest of all limits wins.", gt=0)
    max_attention_window: list[PositiveInt] | None = stable(
        None, "Attention windows in tokens, one a layer, repeated over the layers; null follows the model."
    )
    sink_token_length: int | None = stable(
        None, "First tokens that layers with an attention window keep in reach; 0 or null is none.", ge=0
    )
    free_gpu_memory_fraction: float = stable(
        0.9, "Share of the memory that is free after loading (on a CPU: that the process may use).", ge=0, le=1
    )
    max_gpu_total_bytes: int = stable(0, "Capacity in bytes; 0 sets no such limit.", ge=0)
    host_cache_size: int | None = stable(
        None, "Bytes of pinned host memory for evicted blocks; 0 or null is off.", ge=0
    )
    disk_cache_size: int | None = prototype(None, "Bytes of disk for evicted blocks; 0 or null is off.", ge=0)
    disk_cache_path: str | None = prototype(None, "Folder of the disk tier; has to exist when disk_cache_size is set.")
    disk_prefetch_num_reqs: int = prototype(0, "Waiting requests whose blocks are read from disk ahead.", ge=0)
    cross_kv_cache_fraction: float | None = stable(
        None, "Share of the cache for cross attention; encoder-decoder models need it, others refuse it.", ge=0, le=1
    )
    secondary_offload_min_priority: int | None = stable(
        None, "Lowest priority that is copied to the host tier; null is 35.", ge=0, le=100
    )
    event_buffer_max_size: int = stable(0, "Cache events kept for a reader; 0 is off.", ge=0)
    attention_dp_events_gather_period_ms: int = stable(
        5, "Period in which data-parallel ranks' events are joined.", gt=0
    )
    kv_events_config: KVEventsConfig | None = prototype(None, "Stream cache events to subscribers.")
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = prototype(
        "auto", "Hash that names blocks in events."
    )
    enable_partial_reuse: bool = stable(True, "Also reuse the matching front of a block.")
    copy_on_partial_reuse: bool = stable(True, "Copy such a block when somebody else holds it.")
    use_uvm: bool = deprecated(False, "Ignored: unified memory is not used.")
    iteration_stats_interval: int = stable(1, "Steps between KV statistics.", gt=0)
    dtype: str = stable("auto", "Type of stored keys and values: auto (the model's), fp8, nvfp4 or a dtype's name.")
    tokens_per_block: int = stable(32, "Tokens in a block: a power of two greater than 1.", gt=1)
    use_kv_cache_manager_v2: bool | Literal["auto"] = prototype("auto", "Accepted for old files: there is one manager.")
    enable_swa_scratch_reuse: bool = prototype(False, "Share scratch blocks of sliding-window layers.")
    max_util_for_resume: float = prototype(0.95, "Paused requests resume below this use of the pool.", gt=0, le=1)
    enable_kv_pool_rebalance: bool = prototype(False, "Move memory between layer groups' pools by observed use.")
    kv_pool_rebalance_min_sampled_kv_caches: int = prototype(2000, "Requests observed before the first move.", gt=0)
    kv_pool_rebalance_cooldown_secs: float = prototype(120.0, "Seconds between moves.", ge=0)
    kv_pool_rebalance_target_ratio_update_interval: int = prototype(
        100, "Requests between updates of the target.", gt=0
    )
    kv_pool_rebalance_ratio_threshold: float = prototype(1.25, "Smallest mismatch that is worth a move.", gt=1)
    kv_pool_rebalance_moving_average_decay: float = prototype(0.9999, "Weight of the past in averages.", gt=0, lt=1)
    kv_pool_rebalance_check_interval: int = prototype(10, "Steps between checks.", gt=0)
    pool_ratio: list[float] | None = prototype(None, "Share of each layer group's pool; the shares add up to 1.")
    avg_seq_len: int | None = prototype(None, "Expected length of a sequence, to size pools of hybrid models.", gt=0)
    block_reuse_config: BlockReuseConfig = prototype(
        BlockReuseConfig, "Which blocks of a finished request stay findable."
    )
    fp8_context_mla_kv_len_cap: int | None = prototype(
        None, "Cap of the FP8 prefill workspace of MLA, in tokens.", gt=0
    )
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = stable(
        "auto", "Type of recurrent states; auto is the model's."
    )
    mamba_ssm_stochastic_rounding: bool = stable(False, "Round recurrent states stochastically.")
    mamba_ssm_philox_rounds: int = stable(10, "Rounds of the generator behind stochastic rounding.", ge=1)
    mamba_state_cache_interval: int | None = deprecated(
        None, "Old spelling of mamba_state_config.periodic_snapshot_interval.", ge=0
    )
    mamba_state_config: MambaStateConfig = stable(MambaStateConfig, "When recurrent states are kept for reuse.")

    @field_validator("dtype", "mamba_ssm_cache_dtype", mode="before")
    @classmethod
    def _one_spelling(cls, value: Any) -> Any:
        return dtype_name(value)

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        known = ("auto", "float16", "bfloat16", "float32", "fp8", "float8_e4m3fn", "fp8_ds_mla", "nvfp4")
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got '{value}'")
        return value

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"must be a power of two greater than 1, got {value}")
        return value

    @field_validator("max_attention_window")
    @classmethod
    def _names_a_window(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and not value:
            raise ValueError("must name at least one window, or be null")
        return value

    @field_validator("pool_ratio")
    @classmethod
    def _adds_up_to_one(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and (not value or min(value) <= 0 or abs(sum(value) - 1) > 1e-6):
            raise ValueError(f"shares must be positive and add up to 1, got {value}")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)
        if self.mamba_state_cache_interval is not None:
            self.mamba_state_config.derive(periodic_snapshot_interval=self.mamba_state_cache_interval)
            self.derive(mamba_state_config=self.mamba_state_config, mamba_state_cache_interval=None)
        return self

    def check_groups(self, num_groups: int) -> None:
        """What fits the configuration to a model, whose layer groups are not known before.

        Raises:
            ValueError: `pool_ratio` has another number of shares.
        """
        if self.pool_ratio is not None and len(self.pool_ratio) != num_groups:
            raise ValueError(
                f"kv_cache_config.pool_ratio: {len(self.pool_ratio)} shares for a model of {num_groups} layer groups:"
                " give one for each, or remove it"
            )

    def _problems(self) -> list[Problem]:
        found: list[Problem] = []
        block = self.tokens_per_block
        if self.max_tokens is not None and self.max_tokens < block:
            found.append(Problem("max_tokens", f"{self.max_tokens} is less than one block: at least {block} is needed"))
        interval = self.mamba_state_cache_interval or self.mamba_state_config.periodic_snapshot_interval
        if interval % block:
            old = self.mamba_state_cache_interval is not None
            name = "mamba_state_cache_interval" if old else "mamba_state_config.periodic_snapshot_interval"
            found.append(Problem(name, f"{interval} is no multiple of tokens_per_block ({block})"))
        if self.dtype == "fp8_ds_mla" and self.enable_kv_pool_rebalance:
            found.append(Problem("enable_kv_pool_rebalance", "can't be used with dtype fp8_ds_mla"))
        state = self.mamba_state_config
        if self.mamba_state_cache_interval is not None and "periodic_snapshot_interval" in state.model_fields_set:
            found.append(
                Problem(
                    "mamba_state_cache_interval",
                    "old spelling of mamba_state_config.periodic_snapshot_interval, which is set too: remove it",
                )
            )
        if state.has_extra_snapshots and self.use_kv_cache_manager_v2 is False:
            found.append(
                Problem("use_kv_cache_manager_v2", "extra snapshots of mamba_state_config need it: use true or auto")
            )
        if self.disk_cache_size and not self.disk_cache_path:
            found.append(Problem("disk_cache_path", "required when disk_cache_size is set: name an existing folder"))
        return found
