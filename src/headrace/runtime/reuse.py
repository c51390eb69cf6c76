"""Which prefixes are reused in the end, for the start log and for front ends."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from headrace.kvcache.settings import CacheSettings
from headrace.seam import GroupSpec


class Reuse(NamedTuple):
    granularity: int
    """Tokens: a shared prefix is reused in multiples of it; 0 is no reuse."""
    text: str
    """One line for the log."""


def reuse_of(settings: CacheSettings, groups: Sequence[GroupSpec]) -> Reuse:
    """What the settings come to with this model's layers."""
    if not settings.reuse:
        return Reuse(0, "block reuse: off (kv_cache_config.enable_block_reuse)")
    size = settings.tokens_per_block
    if any(group.is_recurrent for group in groups):
        return _at_snapshots(settings)
    if settings.partial_reuse:
        how = "copied" if settings.copy_on_partial_reuse else "taken over while nobody else holds it"
        return Reuse(1, f"block reuse: on, from 1 shared token (a block of {size} that is shared in part is {how})")
    return Reuse(size, f"block reuse: on, in whole blocks of {size} tokens: a shorter shared prefix is never reused")


def _at_snapshots(settings: CacheSettings) -> Reuse:
    size = settings.tokens_per_block
    extra = [*settings.snapshots_from_start, *settings.snapshots_from_end]
    has_extra = bool(extra) or settings.branch_snapshots
    interval = max(size, settings.snapshot_interval // size * size) if settings.snapshot_interval else 0
    if not interval and not has_extra:
        hint = "kv_cache_config.mamba_state_config.periodic_snapshot_interval is 0"
        return Reuse(0, f"block reuse: off, since no states of the recurrent layers are kept ({hint})")
    where = [f"every {interval} tokens"] * bool(interval) + ["at the extra places of mamba_state_config"] * has_extra
    granularity = gcd(interval, size) if has_extra else interval
    text = f"block reuse: on, where states of the recurrent layers are kept: {' and '.join(where)}"
    return Reuse(granularity, text)
