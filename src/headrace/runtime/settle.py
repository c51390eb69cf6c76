"""`settle`: what the configuration asked for, and what the open engine has, become final sizes."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.llm_args import LlmArgs
from headrace.runtime.memory_table import MemoryRow, MemoryTable, group_rows, tier_row
from headrace.runtime.sizing import (
    DEFAULT_AVG_SEQ_LEN,
    Demand,
    Pools,
    longest_that_fits,
    pool_bytes,
    share_by_ratio,
    share_out,
    share_tier,
)
from headrace.scheduler.settings import SchedulerSettings
from headrace.seam import EngineFacts, PoolSizes

GIB = 1 << 30
CPU_POOL_CAP_BYTES = 4 * GIB
"""On a CPU the pool is capped: main memory belongs to others too. `max_gpu_total_bytes` raises it."""
MAX_SPARE_SLOTS = 256
STAGING_BLOCKS = 64
"""Of each group, on the host, where only a disk tier was asked for."""
CPU_STEP_S = 0.5
"""What a step takes for prompts, where nobody asked for another time: a cancel or a new request waits for its end."""
SLOT_BYTES = 1024
"""About what a slot costs in the scheduler and the sampler, used or not, beside its block tables."""
STATES_SHARE = 0.5
"""Of the free memory, at most, for the live states of a batch whose size nobody asked for."""


class NoRoom(MemoryError):
    """The KV cache does not fit; the message says what was there and what to turn down."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Frozen for the life of the runtime."""

    scheduler: SchedulerSettings
    sizes: PoolSizes
    max_seq_len: int
    num_tokens: int
    """Tokens that the device's pools hold: the most that one request may have."""
    demand: Demand
    memory: MemoryTable

    @property
    def table(self) -> str:
        """The memory plan, for the log."""
        return self.memory.text()

    @property
    def usable_blocks(self) -> int:
        return self.num_tokens // self.scheduler.tokens_per_block


def settle(args: LlmArgs, facts: EngineFacts) -> Settled:
    """Final sizes.

    Raises:
        ValueError: a setting that contradicts the model.
        NoRoom: not one request's blocks fit.
    """
    kv = args.kv_cache_config
    kv.check_groups(len(facts.groups))
    room = _Room(args, facts)
    budget = room.kv_budget_bytes
    limit = length_limit(args, facts)
    demand = demand_of(args)
    groups, block = facts.groups, kv.tokens_per_block
    capped = limit if kv.max_tokens is None else min(limit, kv.max_tokens // block * block)
    longest = longest_that_fits(groups, demand, budget, capped)
    if longest < min(block, limit):
        raise room.no_room(demand)
    pools = _pools(args, facts, demand, budget, longest=longest)
    held = demand.tokens_held(groups, pools.usable)
    max_seq_len = limit if args.max_seq_len != "auto" else longest if held is None else min(longest, held)
    num_tokens = demand.blocks_of(max_seq_len) * block if held is None else held
    sizes = PoolSizes(
        pools.num_blocks,
        room.num_slots,
        host_blocks=_host_tier(args, facts, pools),
        disk_blocks=_tier(args, facts, pools, "disk_cache_size"),
        disk_folder=kv.disk_cache_path or "" if kv.disk_cache_size else "",
    )
    scheduler = scheduler_settings(
        args, max_seq_len=max_seq_len, max_batch_size=room.max_batch_size, on_cpu=room.on_cpu
    )
    return Settled(scheduler, sizes, max_seq_len, num_tokens, demand, room.table(sizes))


def depth_of(args: LlmArgs) -> int:
    """Plans in flight while the next one is made."""
    return 0 if args.disable_overlap_scheduler else 1


def demand_of(args: LlmArgs) -> Demand:
    """What one sequence asks of the pools under this configuration."""
    kv = args.kv_cache_config
    states = kv.mamba_state_config
    extra = [*states.additional_snapshot_offsets_from_start, *states.additional_snapshot_offsets_from_end]
    num_extra = len(extra) + states.enable_branch_snapshot
    return Demand(
        tokens_per_block=kv.tokens_per_block,
        max_tokens_in_flight=(depth_of(args) + 1) * args.max_num_tokens,
        max_sequences=args.max_batch_size,
        keeps_prefixes=kv.enable_block_reuse,
        has_beams=args.max_beam_width > 1,
        snapshot_interval=states.periodic_snapshot_interval if kv.enable_block_reuse else 0,
        num_extra_snapshots=num_extra if kv.enable_block_reuse else 0,
    )


class _Room:
    """The memory of one rank, as it is given out: everything else first, then a share of the rest to the KV cache."""

    def __init__(self, args: LlmArgs, facts: EngineFacts) -> None:
        self.args = args
        self.facts = facts
        self.state_bytes = sum(group.state_bytes for group in facts.groups)
        """Of one slot."""
        if facts.activation_bytes >= facts.free_bytes:
            raise NoRoom(
                f"no memory for the KV cache: a step of max_num_tokens {args.max_num_tokens} takes"
                f" {facts.activation_bytes:,} of the {facts.free_bytes:,} bytes that are free; lower max_num_tokens"
            )
        self.free_bytes = max(facts.free_bytes - facts.activation_bytes - facts.graph_bytes, 0)
        self.max_batch_size = self._settle_batch()
        self.num_slots = num_slots(self.max_batch_size, args)
        self.slot_bytes = self.num_slots * self._bytes_a_slot()
        if self.slot_bytes > self.free_bytes:
            raise NoRoom(
                f"max_batch_size: the tables of {self.max_batch_size} sequences take {self.slot_bytes:,} bytes and"
                f" {self.free_bytes:,} bytes are free: lower it"
            )
        self.states_bytes = self._rows(self.num_slots) * self.state_bytes
        if self.states_bytes > self.free_bytes - self.slot_bytes:
            raise NoRoom(
                f"max_batch_size: the recurrent states of {self.max_batch_size} sequences take {self.states_bytes:,}"
                f" bytes and {self.free_bytes - self.slot_bytes:,} bytes are free: lower it"
            )

    def _settle_batch(self) -> int:
        """As configured; a default that asks for more live states than there is room for is lowered to what fits."""
        batch = self.args.max_batch_size
        if not self.state_bytes or "max_batch_size" in self.args.model_fields_set:
            return batch
        most = int(self.free_bytes * STATES_SHARE) // self.state_bytes
        while batch > 1 and self._rows(num_slots(batch, self.args)) > most:
            batch -= 1
        return batch

    @staticmethod
    def _rows(slots: int) -> int:
        """Live states that the engine keeps: one more, for rows of sequences that have ended."""
        return slots + 1

    def _bytes_a_slot(self) -> int:
        """Its row of each group's block table, and what the scheduler and the sampler keep of it."""
        block = self.args.kv_cache_config.tokens_per_block
        longest = -(-self.facts.max_position // block) + 1
        block_bytes = min(group.block_bytes(block) for group in self.facts.groups)
        table = min(longest, self.free_bytes // block_bytes + 1)
        return SLOT_BYTES + 4 * table * len(self.facts.groups)

    @property
    def on_cpu(self) -> bool:
        return self.facts.device.startswith("cpu")

    @property
    def kv_free_bytes(self) -> int:
        """What the fraction is of. Beside a CPU's pools, the host tier is in the same memory."""
        host_bytes = self.args.kv_cache_config.host_cache_size or 0
        taken = self.slot_bytes + self.states_bytes + (host_bytes if self.on_cpu else 0)
        return max(self.free_bytes - taken, 0)

    @property
    def kv_budget_bytes(self) -> int:
        """The smallest of: the fraction of what is free; the absolute cap."""
        kv = self.args.kv_cache_config
        budget = int(self.kv_free_bytes * kv.free_gpu_memory_fraction)
        if kv.max_gpu_total_bytes:
            return min(budget, kv.max_gpu_total_bytes)
        return min(budget, CPU_POOL_CAP_BYTES) if self.on_cpu else budget

    def no_room(self, demand: Demand) -> NoRoom:
        """What left no room, and what to do about that."""
        facts, kv = self.facts, self.args.kv_cache_config
        budget = self.kv_budget_bytes
        usable = [max(demand.at_least(group, kv.tokens_per_block), 1) for group in facts.groups]
        least = pool_bytes(facts.groups, usable, kv.tokens_per_block)
        if budget >= least:
            return NoRoom(
                f"kv_cache_config.max_tokens: {kv.max_tokens} leaves no room for one block of the KV cache: "
                f"raise it to at least {kv.tokens_per_block} (tokens_per_block)"
            )
        if budget and budget == kv.max_gpu_total_bytes:
            remedy = "raise kv_cache_config.max_gpu_total_bytes"
        elif self.on_cpu and kv.host_cache_size and self.kv_free_bytes + kv.host_cache_size >= least:
            remedy = f"kv_cache_config.host_cache_size takes {kv.host_cache_size:,} bytes of the same memory; lower it"
        elif self.states_bytes >= least:
            remedy = (
                f"the recurrent states of max_batch_size {self.max_batch_size} take {self.states_bytes:,}; lower it"
            )
        else:
            remedy = "free memory, raise kv_cache_config.free_gpu_memory_fraction, or choose a smaller model"
        return NoRoom(
            f"no memory for the KV cache: its smallest pools, of {kv.tokens_per_block} tokens, take {least:,} bytes"
            f" and {budget:,} bytes are left for them; {remedy}"
        )

    def table(self, sizes: PoolSizes) -> MemoryTable:
        """Every use of the memory, in the order in which it is taken."""
        facts, block = self.facts, self.args.kv_cache_config.tokens_per_block
        pools = group_rows(facts.groups, sizes.num_blocks, block)
        kv_bytes = sum(row.size_bytes for row in pools)
        host = tier_row("host", facts.groups, sizes.host_blocks, block)
        disk = tier_row("disk", facts.groups, sizes.disk_blocks, block)
        left = self.free_bytes - self.slot_bytes - self.states_bytes - kv_bytes
        if host is not None and self.on_cpu:
            left -= host.size_bytes
        rows = [
            MemoryRow("weights", facts.weight_bytes),
            MemoryRow("activations", facts.activation_bytes, self.args.max_num_tokens, "a full step"),
            MemoryRow("CUDA graphs", facts.graph_bytes, note="" if facts.graph_bytes else "none"),
            MemoryRow("slots", self.slot_bytes, note=f"{self.num_slots} for {self.max_batch_size} sequences"),
        ]
        if self.state_bytes:
            note = f"{self.state_bytes:,} bytes a sequence"
            rows.append(MemoryRow("recurrent states", self.states_bytes, note=note))
        rows += [*pools, MemoryRow("reserve", left)]
        if facts.kept_bytes:
            note = "mapped from the checkpoint, read when used"
            rows.append(MemoryRow("weights for speculation", facts.kept_bytes, note=note, tier="host"))
        return MemoryTable(facts.device, tuple(rows + [row for row in (host, disk) if row is not None]))


def length_limit(args: LlmArgs, facts: EngineFacts) -> int:
    """The longest sequence that configuration and model allow, whatever fits."""
    if not isinstance(args.max_seq_len, int):
        return facts.max_position
    if args.max_seq_len > facts.max_position:
        raise ValueError(
            f"max_seq_len: {args.max_seq_len} exceeds the model's {facts.max_position} positions; "
            "lower it, or give the model's rope scaling in model_kwargs"
        )
    return args.max_seq_len


def _pools(args: LlmArgs, facts: EngineFacts, demand: Demand, budget_bytes: int, *, longest: int) -> Pools:
    kv = args.kv_cache_config
    if kv.pool_ratio is not None:
        return share_by_ratio(facts.groups, demand, budget_bytes, ratio=kv.pool_ratio, max_tokens=kv.max_tokens)
    average = min(kv.avg_seq_len or DEFAULT_AVG_SEQ_LEN, longest)
    return share_out(facts.groups, demand, budget_bytes, longest=longest, average=average, max_tokens=kv.max_tokens)


def _host_tier(args: LlmArgs, facts: EngineFacts, pools: Pools) -> tuple[int, ...]:
    """As configured. What comes from a disk goes through the host, so a disk tier alone gets a few blocks there."""
    kv = args.kv_cache_config
    if kv.disk_cache_size and not kv.host_cache_size:
        return tuple(min(count, STAGING_BLOCKS) + 1 for count in pools.usable)
    return _tier(args, facts, pools, "host_cache_size")


def _tier(args: LlmArgs, facts: EngineFacts, pools: Pools, key: str) -> tuple[int, ...]:
    size_bytes: int | None = args.kv_cache_config.__dict__[key]
    if not size_bytes:
        return ()
    try:
        return share_tier(facts.groups, args.kv_cache_config.tokens_per_block, pools, size_bytes)
    except ValueError as error:
        raise ValueError(f"kv_cache_config.{key}: {error}") from None


def num_slots(max_batch_size: int, args: LlmArgs) -> int:
    """A request that ended holds its slot while a row of it is in flight."""
    return max_batch_size + (min(max_batch_size, MAX_SPARE_SLOTS) if depth_of(args) else 0)


def scheduler_settings(args: LlmArgs, *, max_seq_len: int, max_batch_size: int, on_cpu: bool) -> SchedulerSettings:
    policy = args.scheduler_config
    chunking = policy.context_chunking_policy
    return SchedulerSettings(
        max_batch_size=max_batch_size,
        max_num_tokens=args.max_num_tokens,
        max_seq_len=max_seq_len,
        num_slots=num_slots(max_batch_size, args),
        tokens_per_block=args.kv_cache_config.tokens_per_block,
        depth=depth_of(args),
        capacity_policy=policy.capacity_scheduler_policy.value,
        chunking_policy=chunking.value if chunking is not None else "FIRST_COME_FIRST_SERVED",
        chunked_prefill=args.enable_chunked_prefill,
        queue_by_priority=policy.waiting_queue_policy == "priority",
        prefix_aware=policy.enable_prefix_aware_scheduling,
        reuse=args.kv_cache_config.enable_block_reuse,
        batch_wait_timeout_s=args.batch_wait_timeout_ms / 1000,
        batch_wait_iters=args.batch_wait_timeout_iters,
        batch_wait_max_tokens_ratio=args.batch_wait_max_tokens_ratio,
        max_step_s=args.max_step_s or (CPU_STEP_S if on_cpu else 0.0),
    )
