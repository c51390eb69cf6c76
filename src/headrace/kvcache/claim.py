"""What the cache wants to know of a request besides its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kvcache.radix import Namespace
from headrace.types import MediaSpan, Retention


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One a request, made once: who may share its blocks, and how long they should stay."""

    space: Namespace
    media: tuple[MediaSpan, ...] = ()
    retention: Retention | None = None
    prompt_len: int = 0
    """Tokens from here on are generated ones; what retention and snapshots count from."""
