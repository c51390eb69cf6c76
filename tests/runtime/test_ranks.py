"""What several ranks report of one copy becomes one report."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.runtime.ranks import ReportMerger
from headrace.seam import StepResult, ints


def merge(merger: ReportMerger, *ranks: tuple[Sequence[int], Sequence[int]]) -> tuple[list[int], list[int]]:
    results = [StepResult(0, (), finished_copies=ints(done), failed_copies=ints(failed)) for done, failed in ranks]
    finished, failed = merger.merge(results)
    return finished.tolist(), failed.tolist()


def test_a_copy_has_ended_when_it_has_on_all_ranks() -> None:
    merger = ReportMerger(3)
    assert merge(merger, ([1, 2], []), ([1], []), ([1], [])) == ([1], [])
    assert merge(merger, ([], []), ([3, 2], []), ([], [])) == ([], [])
    assert merge(merger, ([3], []), ([], []), ([2, 3], [])) == ([2, 3], [])


def test_one_rank_that_failed_is_enough() -> None:
    merger = ReportMerger(2)
    assert merge(merger, ([1], [1]), ([2], [])) == ([], [])
    assert merge(merger, ([2], [2]), ([1], [])) == ([2, 1], [2, 1])
    assert merge(merger, ([1, 2], []), ([1, 2], [])) == ([1, 2], [])  # nothing is left of the first time


def test_one_rank_passes_through() -> None:
    assert merge(ReportMerger(1), ([4, 5], [5])) == ([4, 5], [5])
