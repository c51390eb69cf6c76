"""What the cache is told once, after `settle`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.seam import GroupSpec, PoolSizes
from headrace.types import DEFAULT_PRIORITY

ReusePolicy = Literal["all_reusable", "per_request", "per_conversation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    tokens_per_block: int
    reuse: bool = True
    partial_reuse: bool = True
    """Also the front of a block whose rest differs."""
    copy_on_partial_reuse: bool = True
    """Copy that block; otherwise it is taken over, when nobody holds it."""
    reuse_policy: ReusePolicy = "all_reusable"
    """Who may find a request's blocks: everybody, itself after a preemption, or its conversation."""
    max_num_turns: int = 1
    """Turns of a conversation whose blocks are kept, under `per_conversation`."""
    offload_min_priority: int = DEFAULT_PRIORITY
    """Victims below it are dropped instead of going down a tier."""
    fingerprint: str = ""
    """`EngineFacts.fingerprint`: what else changes K and V."""
    max_tokens_in_flight: int = 0
    """Of all requests together, which bounds their blocks in window groups; 0 is no bound."""
    max_pinned_share: float = 0.5
    """Of each device pool."""
    event_buffer_size: int = 0
    event_hash_algo: str = "auto"
    max_seq_len: int = 0
    """What events call the window of a group without one."""
    snapshot_interval: int = 0
    """Tokens between snapshots of recurrent states; 0 takes none."""
    snapshots_from_start: tuple[int, ...] = ()
    snapshots_from_end: tuple[int, ...] = ()
    branch_snapshots: bool = False
    """Also where a prompt leaves a known path."""
    max_util_for_resume: float = 0.95
    """A preempted request comes back while less than this share of each pool is held."""
    copy_bytes_per_s: float = 0.0
    """Between host and device, `EngineFacts.copy_bytes_per_s`; 0.0 is unknown."""
    num_prefetch: int = 0
    """Waiting requests whose disk blocks are fetched ahead."""


def check_sizes(groups: tuple[GroupSpec, ...], sizes: PoolSizes, settings: CacheSettings) -> None:
    """Raises ValueError with the remedy."""
    size, num_blocks = settings.tokens_per_block, sizes.num_blocks
    if size < 1 or size & (size - 1):
        raise ValueError(f"tokens_per_block is {size}: use a power of two, such as 32")
    if not groups or len(groups) != len(num_blocks):
        raise ValueError(f"num_blocks has {len(num_blocks)} entries for {len(groups)} layer groups: give each one")
    for name, counts in (("host_blocks", sizes.host_blocks), ("disk_blocks", sizes.disk_blocks)):
        if counts and len(counts) != len(groups):
            raise ValueError(f"{name} has {len(counts)} entries for {len(groups)} layer groups: give each one, or none")
    if sizes.disk_blocks and not sizes.host_blocks:
        raise ValueError("disk_blocks without host_blocks: a disk tier needs a host tier")
    if any(count < 2 and not group.is_recurrent for count, group in zip(num_blocks, groups, strict=True)):
        raise ValueError(f"num_blocks is {num_blocks}: each group needs 2 or more, the dummy block is one of them")
