"""What the backends here have in common; one from outside may do otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.attention.port import AttentionStep, CacheSpec


class BlockLayout:
    """A block holds its tokens side by side within each head: [..., block_size, features]."""

    def block_shape(self, shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
        """Of (heads, dim): (heads, block_size, dim); of (dim,): (block_size, dim)."""
        return (*shape[:-1], block_size, shape[-1])

    def plan(self, step: AttentionStep) -> None:
        """Nothing is shared between layers, or the first of them makes it, which knows the heads."""

    def wants_lengths(self, context_rows: Sequence[tuple[int, int]], spec: CacheSpec) -> bool:
        """Lengths on the device do."""
        return False
