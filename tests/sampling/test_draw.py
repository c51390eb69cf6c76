from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling import draw
from headrace.sampling.noise import Purpose, uniform
from headrace.types import Sampling
from tests.sampling import twin
from tests.sampling.driver import params_of

LARGEST = 1 - 2.0**-53
SMALLEST = 2.0**-53


def _uniform(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 1e-30]), min_size=1, max_size=9), st.floats(SMALLEST, LARGEST))
def test_inverse_cdf_finds_a_positive_weight(weights: list[float], u: float) -> None:
    index = draw.inverse_cdf(torch.tensor([weights]), _uniform(u)).item()
    if not any(weights):
        assert index == len(weights)
        return
    assert index in {token for token, w in enumerate(weights) if w > 0}
    total = sum(weights)
    before = sum(weights[: int(index)]) / total
    assert before - 1e-12 <= u <= before + weights[int(index)] / total + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_of_the_interval(dtype: torch.dtype) -> None:
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.7, 0.1, 0.0]], dtype=dtype)
    assert draw.inverse_cdf(weights, _uniform(SMALLEST)).tolist() == [1]
    assert draw.inverse_cdf(weights, _uniform(LARGEST)).tolist() == [4]
    assert draw.inverse_cdf(weights, _uniform(1.0)).tolist() == [4]


FILTERS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, min_p=0.2),
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.0, top_k=9),
    Sampling(temperature=2.0, top_p=0.8),
    Sampling(temperature=1.0, top_p=0.97, min_p=0.05),
    Sampling(temperature=0.5, top_k=6, top_p=0.7, min_p=0.01),
]


def _ways(sampling: Sampling) -> list:
    """Every function that may draw a row with these parameters."""
    if sampling.top_k > 0:
        return [draw.draw_sorted, lambda *args: draw.draw_top_k(*args, num=9)]
    if sampling.top_p < 1.0:
        return [draw.draw_sorted, draw.draw_top_p]
    return [draw.draw_sorted, lambda *args: draw.draw_any(*args, has_min_p=True)]


@pytest.mark.parametrize("sampling", FILTERS, ids=repr)
@pytest.mark.parametrize("max_narrow", [2, 5, 1024])
def test_every_way_draws_the_twins_token(sampling: Sampling, max_narrow: int) -> None:
    generator = torch.Generator().manual_seed(max_narrow)
    logits = torch.randn(64, 12, generator=generator).mul(3).round(decimals=2)
    noise = torch.rand(64, generator=generator, dtype=torch.float64)
    params = params_of([sampling] * 64, 12)
    with mock.patch.object(draw, "MAX_NARROW", max_narrow):
        drawn = [way(logits, params, noise).tolist() for way in _ways(sampling)]
    for row, (x, u) in enumerate(zip(logits.tolist(), noise.tolist())):
        acceptable = twin.draw(twin.weights(x, sampling), u)
        assert {tokens[row] for tokens in drawn} <= acceptable


@pytest.mark.parametrize("sampling", FILTERS, ids=repr)
def test_distribution(sampling: Sampling) -> None:
    """Chi-square of many draws against the twin's probabilities."""
    num = 20000
    logits = torch.tensor([2.0, -1.0, 0.5, 1.75, 0.0, -2.0, 1.0, 0.25, -0.5, 1.5, -3.0, 0.75])
    weights = twin.weights(logits.tolist(), sampling)
    noise = uniform(torch.zeros(num, dtype=torch.int64), torch.arange(num), Purpose.SAMPLE)
    params = params_of([sampling] * num, 12)
    for way in _ways(sampling):
        tokens = way(logits.repeat(num, 1), params, noise)
        observed = torch.bincount(tokens, minlength=12).double()
        expected = torch.tensor(weights, dtype=torch.float64) / sum(weights) * num
        assert (observed[expected == 0] == 0).all()
        live = expected > 0
        chi_square = ((observed - expected) ** 2 / expected)[live].sum().item()
        degrees = int(live.sum()) - 1
        assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("sampling", FILTERS, ids=repr)
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_hopeless_rows_give_an_id_inside(sampling: Sampling, value: float) -> None:
    logits = torch.full((2, 12), value)
    logits[1] = torch.arange(12.0)
    params = params_of([sampling] * 2, 12)
    for way in _ways(sampling):
        tokens = way(logits, params, torch.tensor([0.5, LARGEST], dtype=torch.float64))
        assert tokens[0] == 0 and tokens[1] == 11


@pytest.mark.parametrize("sampling", FILTERS, ids=repr)
def test_infinite_logit_wins(sampling: Sampling) -> None:
    logits = torch.zeros(1, 12)
    logits[0, 7] = math.inf
    params = params_of([sampling], 12)
    for way in _ways(sampling):
        for u in (SMALLEST, 0.5, LARGEST):
            assert way(logits, params, _uniform(u)).tolist() == [7]
