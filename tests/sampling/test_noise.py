from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling import noise
from headrace.sampling.noise import Purpose, mix, uniform
from headrace.seeds import as_int64
from headrace.seeds import mix as integer_mix
from tests.sampling import twin

seeds_64 = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(seeds_64, st.integers(0, 2**31)), min_size=1, max_size=8), st.sampled_from(Purpose))
def test_equals_numpy_twin(keys: list[tuple[int, int]], purpose: Purpose) -> None:
    seeds = torch.tensor([as_int64(seed) for seed, _ in keys])
    positions = torch.tensor([position for _, position in keys])
    expected = [twin.uniform(seed, position, purpose) for seed, position in keys]
    assert uniform(seeds, positions, purpose).tolist() == expected


@given(seeds_64)
def test_mix_equals_the_integer_form(value: int) -> None:
    assert mix(torch.tensor([as_int64(value)])).item() == as_int64(integer_mix(value))


def _columns() -> list[torch.Tensor]:
    """Numbers along positions, along neighbouring seeds, and at the same place for each purpose."""
    zeros, counter = torch.zeros(20000, dtype=torch.int64), torch.arange(20000)
    return [
        uniform(zeros, counter, Purpose.SAMPLE),
        uniform(counter, zeros, Purpose.SAMPLE),
        uniform(zeros, counter, Purpose.DRAFT),
        uniform(zeros, counter, Purpose.ACCEPT),
    ]


def test_is_uniform_and_open() -> None:
    for numbers in _columns():
        assert numbers.min() > 0.0 and numbers.max() < 1.0
        observed = torch.histc(numbers, bins=64, min=0.0, max=1.0)
        expected = len(numbers) / 64
        assert ((observed - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5


def test_streams_are_uncorrelated() -> None:
    columns = _columns()
    pairs = [(a, b) for i, a in enumerate(columns) for b in columns[i + 1 :]]
    pairs += [(column[:-1], column[1:]) for column in columns]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / len(a) ** 0.5


@pytest.mark.parametrize("bits", [0, -1, 2**63 - 1, -(2**63)])
def test_no_pattern_reaches_the_ends(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "mix", lambda values: torch.full_like(values, bits))
    number = uniform(torch.tensor([1]), torch.tensor([1]), Purpose.SAMPLE).item()
    assert 0.0 < number < 1.0
