"""What a simulated world is made of: chosen by a test, or drawn at random with every feature."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from headrace.engine.fake_memory import full_group, recurrent_group, window_group
from headrace.kvcache.settings import CacheSettings
from headrace.scheduler.settings import SchedulerSettings
from headrace.seam import GroupSpec, PoolSizes

BLOCK = 4


@dataclass(frozen=True, kw_only=True)
class Setup:
    scheduler: SchedulerSettings
    cache: CacheSettings
    groups: tuple[GroupSpec, ...]
    sizes: PoolSizes
    num_sections: int = 1
    error_rate: float = 0.0
    """Rows that fail."""
    failure_rate: float = 0.0
    """Transfers that fail."""
    lateness: float = 0.6

    @property
    def allows_beams(self) -> bool:
        return not any(spec.is_recurrent for spec in self.groups)


def setup(
    *,
    groups: tuple[GroupSpec, ...] = (full_group(),),
    num_blocks: int | tuple[int, ...] = 40,
    host_blocks: int = 0,
    disk_blocks: int = 0,
    disk_folder: str = "",
    cache: dict[str, Any] | None = None,
    num_sections: int = 1,
    error_rate: float = 0.0,
    failure_rate: float = 0.0,
    lateness: float = 0.6,
    **scheduler: Any,
) -> Setup:
    """`scheduler` and `cache` are changes of their settings."""
    settings = dataclasses.replace(
        SchedulerSettings(
            max_batch_size=8, max_num_tokens=32, max_seq_len=200, num_slots=10, tokens_per_block=BLOCK, max_skips=4
        ),
        **scheduler,
    )
    in_flight = (settings.depth + 1) * settings.max_num_tokens
    base = CacheSettings(
        tokens_per_block=BLOCK, reuse=settings.reuse, max_tokens_in_flight=in_flight, fingerprint="fake"
    )
    count = len(groups)
    return Setup(
        scheduler=settings,
        cache=dataclasses.replace(base, **(cache or {})),
        groups=groups,
        sizes=PoolSizes(
            num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * count,
            settings.num_slots,
            (host_blocks,) * count if host_blocks else (),
            (disk_blocks,) * count if disk_blocks else (),
            disk_folder,
        ),
        num_sections=num_sections,
        error_rate=error_rate,
        failure_rate=failure_rate,
        lateness=lateness,
    )


GROUPS = {
    "full": (full_group(),),
    "two": (full_group(), full_group(1)),
    "window": (window_group(7, layer=0),),
    "full and window": (full_group(), window_group(9)),
    "sinks": (window_group(10, sink_tokens=5, layer=0), full_group(1)),
    "recurrent": (full_group(), recurrent_group(1)),
    "only recurrent": (recurrent_group(0),),
    "all": (full_group(), window_group(6, sink_tokens=3), recurrent_group(2)),
}


def draw(rng: random.Random, *, folder: str, **fixed: Any) -> Setup:
    """Every feature at random; `fixed` are arguments of `setup`."""
    host = rng.choice([0, 6, 30])
    disk = rng.choice([0, 0, 12, 40]) if host else 0
    cache: dict[str, Any] = {
        "partial_reuse": rng.random() < 0.7,
        "copy_on_partial_reuse": rng.random() < 0.7,
        "reuse_policy": rng.choice(["all_reusable", "all_reusable", "all_reusable", "per_request", "per_conversation"]),
        "max_num_turns": rng.choice([1, 2]),
        "offload_min_priority": rng.choice([0, 35, 60]),
        "max_pinned_share": rng.choice([0.2, 0.5]),
        "event_buffer_size": rng.choice([0, 64]),
        "snapshot_interval": rng.choice([0, 8, 16]),
        "snapshots_from_start": rng.choice([(), (4, 20)]),
        "snapshots_from_end": rng.choice([(), (4,)]),
        "branch_snapshots": rng.random() < 0.5,
        "max_util_for_resume": rng.choice([0.7, 0.95]),
        "num_prefetch": rng.choice([0, 3]),
        "copy_bytes_per_s": rng.choice([0.0, 1e3, 1e9]),
    }
    fields: dict[str, Any] = {
        "groups": GROUPS[rng.choice(list(GROUPS))],
        "num_blocks": rng.choice([18, 26, 45]),
        "host_blocks": host,
        "disk_blocks": disk,
        "disk_folder": folder if disk else "",
        "num_sections": rng.choice([1, 1, 2]),
        "error_rate": rng.choice([0.0, 0.0, 0.01]),
        "failure_rate": rng.choice([0.0, 0.1]),
        "lateness": rng.choice([0.2, 0.6, 0.9]),
        "depth": rng.choice([0, 1, 3]),
        "chained": rng.random() < 0.7,
        "draft_len": rng.choice([0, 0, 3]),
        "capacity_policy": rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION", "STATIC_BATCH"]),
        "chunking_policy": rng.choice(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"]),
        "queue_by_priority": rng.random() < 0.3,
        "max_num_tokens": rng.choice([13, 32, 64]),
        "max_step_s": rng.choice([0.0, 0.3]),
    }
    changes = {**fields, **fixed}
    changes["cache"] = {**cache, **fixed.get("cache", {})}
    return setup(**changes)
