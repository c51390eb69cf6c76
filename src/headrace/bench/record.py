"""What came back of one batch of tasks, token by token, and the times that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace import wire
from headrace.bench.workload import Task
from headrace.types import Delta

__all__ = ["Record"]

Floats = NDArray[np.float64]
Indexes = NDArray[np.int64]


@dataclass(frozen=True)
class Record:
    """One batch. Times are seconds of one monotonic clock; a request is the index of its task."""

    tasks: Sequence[Task]
    start_s: Floats  # [requests] when it was handed over
    end_s: Floats  # [requests] when its last message came
    request: Indexes  # [tokens] whose token it is; requests in order, each one's tokens in order of arrival
    token: Indexes  # [tokens]
    time_s: Floats  # [tokens] when it arrived
    ends: Sequence[Delta]
    """By request, the message that ended it."""
    num_steps: int | None
    """None: unknown."""
    num_prompt: Indexes | None = None  # [requests]
    """Prompt tokens as a server counts them, with its template. None: those of the tasks."""

    @staticmethod
    def of(
        tasks: Sequence[Task],
        start_s: Sequence[float],
        outputs: Sequence[tuple[float, wire.Outputs]],
        *,
        first_id: int,
        steps_before: int,
    ) -> Record:
        """From messages in the order of their arrival; every request has ended in them."""
        requests: list[Indexes] = []
        tokens: list[Indexes] = []
        times: list[Floats] = []
        ends: dict[int, Delta] = {}
        end_s = np.zeros(len(tasks))
        for time_s, message in outputs:
            plain_ids, plain_tokens = message.plain
            in_deltas = [token for delta in message.deltas for token in delta.tokens]
            owners = [delta.id for delta in message.deltas for _ in delta.tokens]
            requests.append(np.concatenate([plain_ids, np.array(owners, np.int64)]) - first_id)
            tokens.append(np.concatenate([plain_tokens, np.array(in_deltas, np.int64)]).astype(np.int64))
            times.append(np.full(len(plain_ids) + len(owners), time_s))
            for delta in message.deltas:
                if delta.finish is not None:
                    ends[delta.id - first_id] = delta
                    end_s[delta.id - first_id] = time_s
        request = np.concatenate(requests)
        order = np.argsort(request, kind="stable")
        return Record(
            tasks=tasks,
            start_s=np.array(start_s),
            end_s=end_s,
            request=request[order],
            token=np.concatenate(tokens)[order],
            time_s=np.concatenate(times)[order],
            ends=[ends[number] for number in range(len(tasks))],
            num_steps=outputs[-1][1].step - steps_before,
        )

    @property
    def duration_s(self) -> float:
        """From handing over the first request to the end of the last one."""
        return float(self.end_s.max() - self.start_s.min())

    @cached_property
    def num_output(self) -> Indexes:  # [requests]
        return np.bincount(self.request, minlength=len(self.tasks))

    @property
    def num_input(self) -> Indexes:
        """Prompt tokens that were worked on: none of a request that failed without a token."""  # [requests]
        given = self.num_prompt
        if given is None:
            given = np.array([len(task.prompt) for task in self.tasks], np.int64)
        return np.where(self.is_failed & (self.num_output == 0), 0, given)

    @cached_property
    def is_failed(self) -> NDArray[np.bool_]:
        """Did not end by its length or a stop token."""  # [requests]
        return np.array([bool(end.error) or end.finish not in ("length", "stop") for end in self.ends], np.bool_)

    def output_ids(self) -> list[list[int]]:
        """By request."""
        ends = np.cumsum(self.num_output)[:-1]
        return [each.tolist() for each in np.split(self.token, ends)]

    @cached_property
    def first_s(self) -> Floats:
        """When the first token came; NaN without one."""  # [requests]
        is_first = np.diff(self.request, prepend=-1) != 0
        return self._by_request(is_first)

    @cached_property
    def last_s(self) -> Floats:
        """When the last token came; NaN without one."""  # [requests]
        is_last = np.diff(self.request, append=-1) != 0
        return self._by_request(is_last)

    def _by_request(self, chosen: NDArray[np.bool_]) -> Floats:
        values = np.full(len(self.tasks), np.nan)
        values[self.request[chosen]] = self.time_s[chosen]
        return values

    def ttft_s(self) -> Floats:
        """Time to the first token; NaN without one."""  # [requests]
        return self.first_s - self.start_s

    def tpot_s(self) -> Floats:
        """Mean time for each token after the first; NaN with fewer than two."""  # [requests]
        following = np.where(self.num_output > 1, self.num_output - 1, np.nan)
        return (self.last_s - self.first_s) / following

    def itl_s(self) -> Floats:
        """Every gap between two arrivals of one request. Tokens that arrive together are one arrival."""  # [gaps]
        gaps = np.diff(self.time_s)[np.diff(self.request) == 0]
        return gaps[gaps > 0]

    @property
    def held_s(self) -> Floats:
        """From handing over to the end, well or not."""  # [requests]
        return self.end_s - self.start_s

    def e2e_s(self) -> Floats:
        """The same; NaN for a request that failed: how soon is nothing to be proud of."""  # [requests]
        return np.where(self.is_failed, np.nan, self.held_s)

    def queue_s(self) -> Floats:
        """From handing over to the first step that had work for it; NaN where there was none."""  # [requests]
        scheduled_s = np.array([end.times.first_scheduled_s if end.times else 0.0 for end in self.ends])
        return np.where(scheduled_s > 0, scheduled_s, np.nan) - self.start_s

    def num_cached(self) -> Indexes:
        """Prompt tokens that were in the cache."""  # [requests]
        return np.array([end.cached_tokens for end in self.ends], np.int64)

    def errors(self) -> list[str]:
        """One line for each request that did not end by its length or a stop token."""
        return [
            f"request {task.task_id}: {end.error or end.finish}"
            for task, end, is_failed in zip(self.tasks, self.ends, self.is_failed)
            if is_failed
        ]
