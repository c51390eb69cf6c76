"""Where the time of a request went, for its client."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.front.collector import Collector
from headrace.front.outputs import Timing

__all__ = ["timing_of"]


def timing_of(collectors: Sequence[Collector]) -> Timing | None:
    """Of a whole request: its first choice that runs, the first token of any, the end of all. None without a token."""
    choices = [choice for collector in collectors for choice in collector.choices]
    known = [choice.times for choice in choices if choice.times is not None and choice.times.first_token_s]
    if not known:
        return None
    arrival_s = min(collector.arrival_s for collector in collectors)
    scheduled_s = min(times.first_scheduled_s or times.first_token_s for times in known)
    first_s = min(times.first_token_s for times in known)
    end_s = max(times.last_token_s for times in known)
    spans = (scheduled_s - arrival_s, first_s - scheduled_s, end_s - first_s)
    return Timing(*(round(max(span, 0.0) * 1000, 3) for span in spans))
