"""What is turned, in which order, and to which values.

The order is the reference's: whether the batch bounds concurrency, whether the tokens of a step are too few or too
many, whether the cache is short of memory, whether long prompts want chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIN_NUM_TOKENS = 128
MAX_NUM_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the workload and its loads ask for."""

    most_requests: int
    """That run at a time."""
    longest_prompt: int
    tokens_per_block: int


@dataclass(frozen=True, slots=True)
class Knob:
    path: str
    """Dotted key of the setting."""
    question: str
    """What is found out by it."""
    values: Callable[[Asked], Sequence[Any]]


def _batch_sizes(asked: Asked) -> list[int]:
    """From a quarter of the requests there will be, to all of them."""
    most = 1 << max(asked.most_requests - 1, 0).bit_length()
    return sorted({max(most // share, 1) for share in (4, 2, 1)})


def _step_tokens(asked: Asked) -> list[int]:
    least = max(asked.most_requests, asked.tokens_per_block, MIN_NUM_TOKENS)
    most = max(asked.most_requests * asked.longest_prompt, least)
    values = [1 << power for power in range(least.bit_length() - 1, most.bit_length() + 1)]
    return [value for value in values if least <= value <= MAX_NUM_TOKENS] or [MAX_NUM_TOKENS]


KNOBS = (
    Knob("max_batch_size", "does the batch bound concurrency", _batch_sizes),
    Knob("max_num_tokens", "are the tokens of a step too few or too many", _step_tokens),
    Knob(
        "kv_cache_config.free_gpu_memory_fraction",
        "is the cache short of memory",
        lambda asked: (0.8, 0.9, 0.95),
    ),
    Knob(
        "scheduler_config.capacity_scheduler_policy",
        "may requests begin before their last block is sure",
        lambda asked: ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"),
    ),
    Knob("enable_chunked_prefill", "do long prompts want chunks", lambda asked: (True, False)),
    Knob(
        "scheduler_config.context_chunking_policy",
        "do prompts take turns",
        lambda asked: ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
    ),
)
