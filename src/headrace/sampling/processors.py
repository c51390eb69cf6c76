"""The caller's logits processors: Python callables, registered in the engine's process under a key.

A processor is called as TensorRT-LLM calls it (`LogitsProcessor.__call__`): once a sampled position,
`processor(req_id, logits, token_ids, stream_ptr, client_id)`. It changes `logits` (float32 [1, 1, vocab])
in place; `token_ids` is [prompt and output so far]; `stream_ptr` is None, because it runs on the current
stream; what it returns is ignored. An exception fails its own request only.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Processor = Callable[[int, Tensor, list[list[int]], int | None, int | None], Any]
"""(req_id, logits, token_ids, stream_ptr, client_id), all by position."""

_lock = threading.Lock()
_keys = itertools.count(1)  # 0 means none
_registered: dict[int, tuple[Processor, ...]] = {}


def register(processors: Sequence[Processor]) -> int:
    """Keep processors, called in this order, until `release`. -> the key for `Sampling.processors`."""
    for processor in processors:
        if not callable(processor):
            raise ValueError(f"logits_processor: {type(processor).__name__} is not callable; pass functions or objects")
    with _lock:
        key = next(_keys)
        _registered[key] = tuple(processors)
    return key


def release(key: int) -> None:
    """Forget the processors of `key`; slots that began with them keep theirs. Safe to call twice."""
    with _lock:
        _registered.pop(key, None)


def lookup(key: int) -> tuple[Processor, ...]:
    """Raises ValueError when `key` isn't registered in this process."""
    with _lock:
        found = _registered.get(key)
    if found is None:
        raise ValueError(
            "logits_processor: not known to the engine's process; "
            "logits processors need an engine in the caller's own process"
        )
    return found


def run(processors: Sequence[Processor], row: Tensor, tokens: list[int], *, request_id: int) -> str:
    """Apply `processors` to one row of logits [vocab], in place. -> what failed, empty when nothing did."""
    logits = row.view(1, 1, -1)
    for processor in processors:
        try:
            processor(request_id, logits, [list(tokens)], None, None)
        except BaseException as error:  # SystemExit too: the engine's thread is not the processor's to end
            return f"logits_processor: {type(error).__name__}: {error}"
    return ""
