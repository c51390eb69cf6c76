from __future__ import annotations

import math

import pytest
import torch

from headrace.sampling.counts import TokenCounts
from headrace.sampling.penalties import mask_stop_ids, penalised
from headrace.seam import ints

CPU = torch.device("cpu")


def _penalise(logits: list[float], counts: torch.Tensor, *, repetition=1.0, presence=0.0, frequency=0.0) -> list[float]:
    def one(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float64)

    result = penalised(
        torch.tensor([logits]), counts, repetition=one(repetition), presence=one(presence), frequency=one(frequency)
    )
    return result[0].tolist()


def _counts(prompt: list[int], output: list[int], *, ignored: int = 0) -> torch.Tensor:
    pool = TokenCounts(6, CPU)
    row = pool.take(ints(prompt + output), prompt_len=len(prompt), ignored=ignored)
    return pool.gather(torch.tensor([row]))


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    counts = _counts(prompt=[0, 0, 1], output=[1, 2, 2, 2])
    logits = [1.0] * 6
    assert _penalise(logits, counts, presence=0.5) == [1.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert _penalise(logits, counts, frequency=0.25) == [1.0, 0.75, 0.25, 1.0, 1.0, 1.0]
    assert _penalise(logits, counts, presence=0.5, frequency=0.25) == [1.0, 0.25, -0.25, 1.0, 1.0, 1.0]


def test_repetition_sees_prompt_and_output() -> None:
    counts = _counts(prompt=[0, 1], output=[2])
    logits = [4.0, -4.0, 2.0, 4.0, -4.0, 0.0]
    assert _penalise(logits, counts, repetition=2.0) == [2.0, -8.0, 1.0, 4.0, -4.0, 0.0]
    assert _penalise(logits, counts, repetition=0.5) == [8.0, -2.0, 4.0, 4.0, -4.0, 0.0]


def test_repetition_comes_before_the_subtractions() -> None:
    counts = _counts(prompt=[], output=[0, 0])
    assert _penalise([4.0] * 6, counts, repetition=2.0, presence=0.5, frequency=0.25)[0] == 4.0 / 2 - 0.5 - 0.5


def test_prompt_ignore_length_leaves_the_first_prompt_tokens_out() -> None:
    counts = _counts(prompt=[0, 1, 2], output=[3], ignored=2)
    assert _penalise([4.0] * 6, counts, repetition=2.0) == [4.0, 4.0, 2.0, 2.0, 4.0, 4.0]
    beyond = _counts(prompt=[0, 1, 2], output=[3], ignored=9)
    assert _penalise([4.0] * 6, beyond, repetition=2.0) == [4.0, 4.0, 4.0, 2.0, 4.0, 4.0]


def test_banned_tokens_stay_banned() -> None:
    counts = _counts(prompt=[0], output=[1])
    for repetition in (0.5, 2.0):
        result = _penalise([-math.inf] * 6, counts, repetition=repetition, presence=-1.0, frequency=-1.0)
        assert result == [-math.inf] * 6


def test_ids_outside_the_vocabulary_are_not_counted() -> None:
    counts = _counts(prompt=[-1, 6, 99, 2], output=[-1, 7])
    assert counts[0].tolist() == [0, 0, 1, 0, 0, 0]


def test_pool_reuses_rows_clean() -> None:
    pool = TokenCounts(4, CPU)
    rows = [pool.take(ints([token]), prompt_len=0, ignored=0) for token in range(3)]
    assert len(set(rows)) == 3 and pool.num_used == 3
    assert pool.gather(torch.tensor(rows)).tolist() == [[2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]]
    pool.release(rows[1])
    again = pool.take(ints([3]), prompt_len=1, ignored=0)
    assert again == rows[1]
    assert pool.gather(torch.tensor(rows)).tolist() == [[2, 0, 0, 0], [0, 0, 0, 1], [0, 0, 2, 0]]


def test_counts_add_what_is_accepted() -> None:
    pool = TokenCounts(4, CPU)
    rows = torch.tensor([pool.take(ints([]), prompt_len=0, ignored=0) for _ in range(2)])
    tokens = torch.tensor([[1, 1, 3], [2, 0, 0]])
    pool.add(rows, tokens, torch.tensor([[True, True, False], [True, False, False]]))
    assert pool.gather(rows).tolist() == [[0, 4, 0, 0], [0, 0, 2, 0]]
    pending = torch.tensor([[1, -1], [0, 0]])
    assert pool.gather(rows, pending).tolist() == [[0, 6, 0, 0], [4, 0, 2, 0]]
    assert pool.gather(rows).tolist() == [[0, 4, 0, 0], [0, 0, 2, 0]]


@pytest.mark.parametrize("first", [1.5, math.inf, -math.inf])
def test_stop_mask_touches_active_stop_ids_only(first: float) -> None:
    logits = torch.full((3, 5), 1.0)
    logits[:, 0] = first
    stop_ids = torch.tensor([[4, 2], [3, -1]])
    mask_stop_ids(logits, stop_ids, rows=torch.tensor([2, 0]), active=torch.tensor([True, False]))
    banned = -math.inf
    assert logits.tolist() == [
        [first, 1.0, 1.0, 1.0, 1.0],
        [first, 1.0, 1.0, 1.0, 1.0],
        [first, 1.0, banned, 1.0, banned],
    ]


def test_stop_mask_without_stop_ids_masks_nothing() -> None:
    logits = torch.ones(2, 3)
    mask_stop_ids(logits, torch.full((2, 2), -1), rows=torch.tensor([0, 1]), active=torch.tensor([True, True]))
    assert logits.tolist() == [[1.0] * 3] * 2
