"""How many tokens of prompts a step computes, so that it ends in time, and how fast prompts are computed.

Whatever arrives while a step runs (a cancel, a short prompt, the next token of a stream) waits for its end. A GPU
computes `max_num_tokens` in tens of milliseconds, a CPU takes a minute for them.
"""

from __future__ import annotations

from headrace.scheduler.settings import SchedulerSettings

FIRST_TOKENS = 64
"""Of a step before anything is measured: a large model on a slow CPU needs seconds for them."""
LEAST_TOKENS = 32
"""Fewer aren't much faster: a step reads all weights."""
SPEED_WEIGHT, PACE_WEIGHT = 0.2, 0.5
"""Of the last step in a moving average; the pace has to follow a machine that others begin to use."""


class Pace:
    """Measured from step to step."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._is_bound = settings.max_step_s > 0 and settings.chunked_prefill
        self._bound = min(FIRST_TOKENS, settings.max_num_tokens) if self._is_bound else settings.max_num_tokens
        """Tokens that a step takes `max_step_s` for."""
        self._rate = 0.0
        """Tokens a second of steps that compute prompts."""
        self.prefill_speed = 0.0
        """Tokens of prompts a second, of steps that mostly compute prompts; 0.0 while there was none."""

    def budget(self, num_generation_tokens: int) -> int:
        """Prompt tokens of one section's step; running generations leave at least half of a step of them."""
        room = self._settings.max_num_tokens - num_generation_tokens
        if not self._is_bound:
            return room
        return min(room, max(self._bound - num_generation_tokens, self._bound // 2, LEAST_TOKENS))

    def note(self, num_context_tokens: float, num_generated: float, forward_s: float) -> bool:
        """A step's tokens, of one section, and its time -> whether it tells the prefill speed."""
        if forward_s <= 0.0:
            return False
        if self._is_bound and num_context_tokens >= LEAST_TOKENS:
            rate = (num_context_tokens + num_generated) / forward_s
            self._rate = _moved(self._rate, rate, PACE_WEIGHT)
            wanted = int(self._rate * self._settings.max_step_s)
            self._bound = min(max(wanted, LEAST_TOKENS), self._settings.max_num_tokens)
        if num_context_tokens < self._bound / 2:
            return False
        self.prefill_speed = _moved(self.prefill_speed, num_context_tokens / forward_s, SPEED_WEIGHT)
        return True


def _moved(average: float, value: float, weight: float) -> float:
    return value if not average else (1.0 - weight) * average + weight * value
