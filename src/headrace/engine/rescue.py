"""A step that the device has no memory for: given up in parts until only what never fits has failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from headrace.engine.batch import leave_out
from headrace.seam import Section, SectionResult, ints

log = logging.getLogger("headrace.engine")

Outcome = Callable[[], SectionResult]

NO_MEMORY = "the device has no memory left for this request's step: lower max_num_tokens or free_gpu_memory_fraction"


def queue_within_memory(
    section: Section, queue: Callable[[Section], Outcome], *, free: Callable[[], None], fail: Callable[[Section], None]
) -> Outcome:
    """Queue the rows; without memory for all of them once more after freeing, then in halves.

    Args:
        queue: what it raises `torch.OutOfMemoryError` for may be queued again.
        free: gives back what isn't in use.
        fail: a row that doesn't fit alone.
    """
    try:
        return queue(section)
    except torch.OutOfMemoryError as error:
        log.warning("no memory for a step of %d rows (%s): trying again", section.num_rows, str(error).split("\n")[0])
    free()
    return _halved(section, queue, free=free, fail=fail)


def _halved(
    section: Section, queue: Callable[[Section], Outcome], *, free: Callable[[], None], fail: Callable[[Section], None]
) -> Outcome:
    try:
        return queue(section)
    except torch.OutOfMemoryError:
        free()
    count = section.num_rows
    if count == 1:
        fail(section)
        failed = SectionResult(ints(np.zeros(1)), ints(), errors={0: NO_MEMORY})
        return lambda: failed
    middle = count // 2
    first = _halved(leave_out(section, range(middle, count)), queue, free=free, fail=fail)
    second = _halved(leave_out(section, range(middle)), queue, free=free, fail=fail)
    return lambda: joined(first(), second())


def joined(first: SectionResult, second: SectionResult) -> SectionResult:
    """The result of rows and of those that come after them."""
    base = len(first.num_accepted)
    return replace(
        first,
        num_accepted=np.concatenate([first.num_accepted, second.num_accepted]),
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=first.logprobs | {base + row: value for row, value in second.logprobs.items()},
        prompt_logprobs=first.prompt_logprobs | {base + row: value for row, value in second.prompt_logprobs.items()},
        logits=first.logits | {base + row: value for row, value in second.logits.items()},
        errors=first.errors | {base + row: value for row, value in second.errors.items()},
        hidden=first.hidden | {base + row: value for row, value in second.hidden.items()},
    )
