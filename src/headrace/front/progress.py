"""Waiting for many requests, with a bar."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from headrace.front.request_output import RequestOutput

__all__ = ["wait_all"]


def wait_all(outputs: Sequence[RequestOutput], *, show_progress: bool) -> None:
    """Wait until every output is finished; an interrupt aborts them all."""
    from tqdm import tqdm

    finished: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    for output in outputs:
        output.when_done(finished.put)
    try:
        with tqdm(
            total=len(outputs), desc="generate", unit="req", disable=not show_progress, dynamic_ncols=True
        ) as bar:
            for _ in outputs:
                finished.get().wait()
                bar.update(1)
    except BaseException:
        for output in outputs:
            output.abort()
        raise
