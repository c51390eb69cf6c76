"""How the token budget of a step is shared between prompts: the context chunking policies.

Each policy is a plain function over lengths. `left[i]` tokens remain of prompt i, `budget` tokens may
be computed, `unit` is the block size: chunks that do not finish their prompt are multiples of it
wherever the budget allows, so that blocks fill whole and enter the prefix index.
Names and meaning: TensorRT-LLM's `context_chunking_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

ChunkPolicy = Callable[[Sequence[int], int, int], list[int]]


def _align(tokens: int, unit: int) -> int:
    """Round an unfinished chunk down to whole blocks, unless not even one fits."""
    return tokens - tokens % unit if tokens >= unit else tokens


def first_come_first_served(left: Sequence[int], budget: int, unit: int) -> list[int]:
    """Each prompt in order takes all it can; only the last one served is cut."""
    chunks: list[int] = []
    for tokens in left:
        chunk = tokens if tokens <= budget else _align(budget, unit)
        chunks.append(chunk)
        budget = budget - chunk if chunk == tokens else 0
    return chunks


def equal_progress(left: Sequence[int], budget: int, unit: int) -> list[int]:
    """Rounds of one block a prompt until the budget is spent."""
    chunks = [0] * len(left)
    open_prompts = [index for index, tokens in enumerate(left) if tokens > 0]
    while budget > 0 and open_prompts:
        still_open: list[int] = []
        for index in open_prompts:
            step = min(unit, left[index] - chunks[index], budget)
            if step < min(unit, left[index] - chunks[index]) and any(chunks):
                continue  # less than a block is left over: give it to nobody rather than split a block
            chunks[index] += step
            budget -= step
            if chunks[index] < left[index]:
                still_open.append(index)
        if still_open == open_prompts and budget < unit:
            break
        open_prompts = still_open
    return chunks


def force_chunk(left: Sequence[int], budget: int, unit: int) -> list[int]:
    """Every prompt advances by at most one block a step, long or short."""
    chunks: list[int] = []
    for tokens in left:
        chunk = min(tokens, unit, budget)
        chunks.append(chunk)
        budget -= chunk
    return chunks


def whole_prompts(left: Sequence[int], budget: int, unit: int) -> list[int]:
    """Chunked prefill off: a prompt runs whole or waits; a later, shorter one may go first."""
    chunks: list[int] = []
    for tokens in left:
        chunk = tokens if tokens <= budget else 0
        chunks.append(chunk)
        budget -= chunk
    return chunks


def least_share(policy: str, tokens: int, unit: int) -> int:
    """Budget that a prompt takes before the next one is served: all of it, or a block where prompts share."""
    return tokens if policy == "FIRST_COME_FIRST_SERVED" else min(tokens, unit)


POLICIES: dict[str, ChunkPolicy] = {
    "FIRST_COME_FIRST_SERVED": first_come_first_served,
    "EQUAL_PROGRESS": equal_progress,
    "FORCE_CHUNK": force_chunk,
}
