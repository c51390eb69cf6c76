"""From settings and facts to what the KV cache is told."""

from __future__ import annotations

from headrace.config.llm_args import LlmArgs
from headrace.kvcache.settings import CacheSettings
from headrace.runtime.settle import Settled
from headrace.seam import EngineFacts
from headrace.types import DEFAULT_PRIORITY


def cache_settings(args: LlmArgs, facts: EngineFacts, settled: Settled) -> CacheSettings:
    kv = args.kv_cache_config
    states = kv.mamba_state_config
    least = kv.secondary_offload_min_priority
    return CacheSettings(
        tokens_per_block=settled.scheduler.tokens_per_block,
        reuse=settled.scheduler.reuse,
        partial_reuse=kv.enable_partial_reuse,
        copy_on_partial_reuse=kv.copy_on_partial_reuse,
        reuse_policy=kv.block_reuse_config.policy,
        max_num_turns=kv.block_reuse_config.max_num_turns,
        offload_min_priority=DEFAULT_PRIORITY if least is None else least,
        fingerprint=facts.fingerprint,
        max_tokens_in_flight=settled.demand.max_tokens_in_flight,
        event_buffer_size=kv.event_buffer_max_size,
        event_hash_algo=kv.kv_cache_event_hash_algo,
        max_seq_len=settled.max_seq_len,
        copy_bytes_per_s=facts.copy_bytes_per_s,
        snapshot_interval=states.periodic_snapshot_interval,
        snapshots_from_start=tuple(states.additional_snapshot_offsets_from_start),
        snapshots_from_end=tuple(states.additional_snapshot_offsets_from_end),
        branch_snapshots=states.enable_branch_snapshot,
        max_util_for_resume=kv.max_util_for_resume,
        num_prefetch=kv.disk_prefetch_num_reqs,
    )
