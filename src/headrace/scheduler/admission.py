"""Who leaves the queue for a slot in this step, and who waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from headrace.kvcache.claim import Claim
from headrace.kvcache.radix import Namespace
from headrace.scheduler.grammars import Grammars
from headrace.scheduler.queue import WaitingQueue
from headrace.scheduler.request import Active, Waiting
from headrace.scheduler.section import SectionScheduler
from headrace.scheduler.settings import SchedulerSettings
from headrace.types import MediaSpan

FirstBlock = tuple[Namespace, tuple[MediaSpan, ...], tuple[int, ...]]


class Admission:
    def __init__(
        self,
        settings: SchedulerSettings,
        sections: Sequence[SectionScheduler],
        queue: WaitingQueue,
        grammars: Grammars,
    ) -> None:
        self.settings = settings
        self.sections = sections
        self.queue = queue
        self.grammars = grammars
        self.outgrown: list[Waiting] = []
        """Still in the queue; whoever owns their terminal states ends them."""
        self._hold_started_s: float | None = None
        self._hold_iters = 0

    def admit(self, now_s: float, budgets: list[int]) -> list[tuple[Active, SectionScheduler]]:
        """Move requests from the queue to slots, in order, while budget, slots and blocks last."""
        if not self.queue.num_ready:
            return []
        open_sections = [
            index for index, section in enumerate(self.sections) if section.policy.may_open_batch(section.num_active)
        ]
        if not open_sections or self._holds_back(now_s):
            return []
        for index in open_sections:
            self.sections[index].open_admission()
        left = [budget - self.sections[index].context_wanted for index, budget in enumerate(budgets)]
        fits = [section.kv.max_tokens() for section in self.sections]
        first_blocks = self._first_blocks_under_way()
        admitted: list[tuple[Active, SectionScheduler]] = []
        taken: list[Waiting] = []
        passed: list[Waiting] = []
        fetching: list[Waiting] = []
        for waiting in self.queue:
            limits = [
                section.limit_of(waiting.request, sequence_fits=most)
                for section, most in zip(self.sections, fits, strict=True)
            ]
            if len(waiting.tokens) >= max(limits):
                # Pins have come since it was accepted, and beside them it has no room for one more token.
                self.outgrown.append(waiting)
                continue
            key = None if waiting.request.pooling else self._first_block(waiting.claim, waiting.tokens)
            if key is not None and key in first_blocks and self._will_hit(waiting):
                continue
            index = self._place(waiting, limits, open_sections, left)
            if index is None:
                passed.append(waiting)
                if self.settings.chunked_prefill or waiting.skipped >= self.settings.max_skips:
                    break
                continue
            if self.sections[index].fetch(waiting):
                fetching.append(waiting)
                continue
            active = self.sections[index].admit(waiting, limits[index], now_s)
            for other in self.sections:
                if other is not self.sections[index]:
                    other.kv.abandon(waiting.request.id)
            admitted.append((active, self.sections[index]))
            left[index] -= self.sections[index].share_of(active.context_left)
            taken.append(waiting)
            if key is not None:
                first_blocks.add(key)
        if taken:
            for waiting in passed:
                waiting.skipped += 1
        self.queue.remove_many(taken)
        for waiting in fetching:
            self.queue.set_aside(waiting, "transfer", float("inf"))  # the cache ends the wait
        return admitted

    def prefetch(self) -> None:
        """Blocks on disk of those next in the queue are brought while they wait."""
        if not self.queue.num_ready:
            return
        section = min(self.sections, key=lambda each: each.num_active)
        ahead = list(islice(self.queue, section.kv.settings.num_prefetch))
        for waiting in ahead:
            if section.fetch(waiting):
                self.queue.set_aside(waiting, "transfer", float("inf"))

    def _place(self, waiting: Waiting, limits: list[int], open_sections: list[int], left: list[int]) -> int | None:
        """The section that can take the request now: the one that has its blocks from disk, or has most budget left."""
        need = 1 if self.settings.chunked_prefill else len(waiting.tokens)
        order = open_sections
        if len(order) > 1:
            request_id, sections = waiting.request.id, self.sections
            order = sorted(
                order, key=lambda at: (not sections[at].kv.has_fetched(request_id), sections[at].num_active, -left[at])
            )
        for index in order:
            if left[index] >= need and self.sections[index].can_admit(waiting, limits[index]):
                return index
        return None

    def _first_block(self, claim: Claim, tokens: list[int]) -> FirstBlock | None:
        block = self.settings.tokens_per_block
        if not self.settings.prefix_aware or not self.settings.reuse or len(tokens) <= block:
            return None
        return claim.space, claim.media, tuple(tokens[:block])

    def _first_blocks_under_way(self) -> set[FirstBlock]:
        """First blocks that prompts under way will make findable soon."""
        keys = {
            self._first_block(active.claim, active.tokens)
            for section in self.sections
            for active in section.prefilling.values()
            if not active.request.pooling  # what it computes is soon gone
        }
        return {key for key in keys if key is not None}

    def _will_hit(self, waiting: Waiting) -> bool:
        """Prefix-aware scheduling: wait a step rather than compute what a neighbour is computing."""
        if self.settings.capacity_policy == "STATIC_BATCH":
            return False  # a batch is opened once; who waits would miss it
        found = max(section.kv.match(waiting.tokens, claim=waiting.claim) for section in self.sections)
        return found < self.settings.tokens_per_block

    def _holds_back(self, now_s: float) -> bool:
        """`batch_wait_*`: let prompts gather before a prefill interrupts generation."""
        settings = self.settings
        if settings.batch_wait_timeout_s <= 0 and settings.batch_wait_iters <= 0:
            return False
        gathered = sum(len(waiting.tokens) for waiting in self.queue)
        enough = settings.batch_wait_max_tokens_ratio * settings.max_num_tokens
        full = enough > 0 and gathered >= enough
        if self._hold_started_s is None:
            self._hold_started_s, self._hold_iters = now_s, 0
        self._hold_iters += 1
        timed_out = settings.batch_wait_timeout_s > 0 and now_s - self._hold_started_s >= settings.batch_wait_timeout_s
        iterated = settings.batch_wait_iters > 0 and self._hold_iters > settings.batch_wait_iters
        if full or timed_out or iterated:
            self._hold_started_s = None
            return False
        return True
