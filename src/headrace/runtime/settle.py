"""`settle`: what the configuration asked for, and what the open engine has, become final sizes."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.llm_args import LlmArgs
from headrace.scheduler.settings import SchedulerSettings
from headrace.seam import EngineFacts

GIB = 1 << 30
CPU_POOL_CAP_BYTES = 4 * GIB
"""On a CPU the pool is capped: main memory belongs to others too. `max_gpu_total_bytes` raises it."""
MAX_SPARE_SLOTS = 256
SLOT_BYTES = 1024
"""About what a slot costs in the scheduler and the sampler, used or not."""


class NoRoom(MemoryError):
    """The KV cache does not fit; the message says what was there and what to turn down."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Frozen for the life of the runtime."""

    scheduler: SchedulerSettings
    num_blocks: tuple[int, ...]
    """By group, the dummy block included."""
    max_seq_len: int
    table: str
    """The memory plan, for the log."""

    @property
    def usable_blocks(self) -> int:
        return min(self.num_blocks) - 1


def settle(args: LlmArgs, facts: EngineFacts) -> Settled:
    """Final sizes.

    Raises:
        ValueError: a setting that contradicts the model.
        NoRoom: not one request's blocks fit.
    """
    kv = args.kv_cache_config
    block = kv.tokens_per_block
    budget = kv_budget_bytes(args, facts)
    per_token = sum(group.bytes_per_token for group in facts.groups)
    num_tokens = budget // per_token
    if kv.max_tokens is not None:
        num_tokens = min(num_tokens, kv.max_tokens)
    max_seq_len = settle_max_seq_len(args, facts, int(num_tokens))
    num_usable = int(num_tokens // block)
    if num_usable < 1:
        raise _no_room(args, facts, block_bytes=per_token * block, budget_bytes=budget)
    num_blocks = (num_usable + 1,) * len(facts.groups)
    depth = 0 if args.disable_overlap_scheduler else 1
    scheduler = scheduler_settings(args, max_seq_len=max_seq_len, depth=depth)
    if scheduler.num_slots * SLOT_BYTES > facts.free_bytes:
        raise NoRoom(
            f"max_batch_size: the tables of {args.max_batch_size} sequences take {scheduler.num_slots * SLOT_BYTES:,} "
            f"bytes and {facts.free_bytes:,} bytes are free: lower it"
        )
    table = memory_table(facts, num_blocks=num_usable, block=block, per_token=per_token)
    return Settled(scheduler, num_blocks, max_seq_len, table)


def _no_room(args: LlmArgs, facts: EngineFacts, *, block_bytes: int, budget_bytes: int) -> NoRoom:
    """What left no room, and what to do about that."""
    kv = args.kv_cache_config
    block = kv.tokens_per_block
    if budget_bytes >= block_bytes:
        return NoRoom(
            f"kv_cache_config.max_tokens: {kv.max_tokens} leaves no room for one block of the KV cache: "
            f"raise it to at least {block} (tokens_per_block)"
        )
    if facts.activation_bytes >= facts.free_bytes:
        remedy = (
            f"a step of max_num_tokens {args.max_num_tokens} takes {facts.activation_bytes:,} of the "
            f"{facts.free_bytes:,} bytes that are free; lower max_num_tokens"
        )
    elif budget_bytes == kv.max_gpu_total_bytes:
        remedy = "raise kv_cache_config.max_gpu_total_bytes"
    else:
        remedy = "free memory, raise kv_cache_config.free_gpu_memory_fraction, or choose a smaller model"
    return NoRoom(
        f"no memory for one block of the KV cache: a block of {block} tokens takes {block_bytes:,} bytes and "
        f"{budget_bytes:,} bytes are left for it; {remedy}"
    )


def kv_budget_bytes(args: LlmArgs, facts: EngineFacts) -> int:
    """The smallest of: the fraction of what is free after loading and a step's activations; the absolute cap."""
    kv = args.kv_cache_config
    free = max(facts.free_bytes - facts.activation_bytes, 0)
    budget = int(free * kv.free_gpu_memory_fraction)
    if kv.max_gpu_total_bytes:
        return min(budget, kv.max_gpu_total_bytes)
    return min(budget, CPU_POOL_CAP_BYTES) if facts.device.startswith("cpu") else budget


def settle_max_seq_len(args: LlmArgs, facts: EngineFacts, pool_tokens: int) -> int:
    if args.max_seq_len is None:
        return facts.max_position
    if args.max_seq_len == "auto":
        return min(facts.max_position, pool_tokens)
    if args.max_seq_len > facts.max_position:
        raise ValueError(
            f"max_seq_len: {args.max_seq_len} exceeds the model's {facts.max_position} positions; "
            "lower it, or give the model's rope scaling in model_kwargs"
        )
    return args.max_seq_len


def scheduler_settings(args: LlmArgs, *, max_seq_len: int, depth: int) -> SchedulerSettings:
    policy = args.scheduler_config
    batch = args.max_batch_size
    spare = min(batch, MAX_SPARE_SLOTS) if depth else 0
    chunking = policy.context_chunking_policy
    return SchedulerSettings(
        max_batch_size=batch,
        max_num_tokens=args.max_num_tokens,
        max_seq_len=max_seq_len,
        num_slots=batch + spare,
        tokens_per_block=args.kv_cache_config.tokens_per_block,
        depth=depth,
        capacity_policy=policy.capacity_scheduler_policy.value,
        chunking_policy=chunking.value if chunking is not None else "FIRST_COME_FIRST_SERVED",
        chunked_prefill=args.enable_chunked_prefill,
        queue_by_priority=policy.waiting_queue_policy == "priority",
        prefix_aware=policy.enable_prefix_aware_scheduling,
        reuse=args.kv_cache_config.enable_block_reuse,
        batch_wait_timeout_s=args.batch_wait_timeout_ms / 1000,
        batch_wait_iters=args.batch_wait_timeout_iters,
        batch_wait_max_tokens_ratio=args.batch_wait_max_tokens_ratio,
    )


def memory_table(facts: EngineFacts, *, num_blocks: int, block: int, per_token: int) -> str:
    kv_bytes = num_blocks * block * per_token
    left = facts.free_bytes - facts.activation_bytes - kv_bytes
    rows = [
        ("weights", facts.weight_bytes, ""),
        ("activations of a full step", facts.activation_bytes, ""),
        ("KV cache", kv_bytes, f"{num_blocks * block:,} tokens in {num_blocks:,} blocks of {block}"),
        ("left", left, ""),
    ]
    lines = [f"memory on {facts.device}:"]
    lines += [f"  {name:<28}{size / GIB:>9.3f} GiB  {note}".rstrip() for name, size, note in rows]
    return "\n".join(lines)
