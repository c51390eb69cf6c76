from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling import filters
from headrace.types import Sampling
from tests.sampling import twin
from tests.sampling.driver import params_of

values = st.one_of(
    st.integers(-16, 16).map(lambda n: n / 8),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, 3e38, -3e38, 1e-40]),
)


@given(st.lists(values, min_size=1, max_size=12), st.data())
def test_ranking_is_by_logit_then_id(row: list[float], data: st.DataObject) -> None:
    num = data.draw(st.integers(1, len(row)))
    logits = torch.tensor([row])
    floats = logits[0].tolist()  # as float32 holds them
    assert filters.best_ids(logits, num)[0].tolist() == twin.ranking(floats)[:num]


@given(st.lists(values, min_size=1, max_size=12), st.sampled_from([1e-5, 1e-4, 0.5, 1.0, 1e4]))
def test_scaled_is_never_nan_and_peaks_at_zero(row: list[float], temperature: float) -> None:
    logits = torch.tensor([row])
    scaled, peak = filters.scaled(logits, torch.tensor([temperature], dtype=torch.float64))
    assert peak.tolist() == [twin.ranking(logits[0].tolist())[0]]
    assert not scaled.isnan().any() and (scaled <= 0).all()
    if max(row) > -math.inf:
        assert scaled[0, peak[0]] == 0.0
    assert (scaled[0][logits[0] == -math.inf] == -math.inf).all()


def _kept(logits: list[float], **settings) -> list[int]:
    params = params_of([Sampling(temperature=1.0, **settings)], len(logits))
    result = filters.filtered(torch.tensor([logits]), params, is_ranked=True)
    return [token for token, value in enumerate(result[0].tolist()) if value > -math.inf]


def _logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_each_filter_by_hand() -> None:
    logits = _logs(0.1, 0.4, 0.2, 0.3)
    assert _kept(logits) == [0, 1, 2, 3]
    assert _kept(logits, top_k=2) == [1, 3]
    assert _kept(logits, top_k=4) == _kept(logits, top_k=400) == [0, 1, 2, 3]
    assert _kept(logits, top_p=0.39) == [1]
    assert _kept(logits, top_p=0.41) == [1, 3]
    assert _kept(logits, top_p=0.71) == [1, 2, 3]
    assert _kept(logits, top_p=1e-9) == [1]
    assert _kept(logits, min_p=0.45) == [1, 2, 3]
    assert _kept(logits, min_p=0.6) == [1, 3]


def test_top_p_is_a_share_of_what_top_k_and_min_p_leave() -> None:
    logits = _logs(0.1, 0.4, 0.2, 0.3)
    assert _kept(logits, top_k=2, top_p=0.56) == [1]  # 0.4 of 0.7 is 0.571
    assert _kept(logits, min_p=0.6, top_p=0.56) == [1]
    assert _kept(logits, top_p=0.56) == [1, 3]


def test_ties_keep_the_smaller_ids() -> None:
    assert _kept([1.0, 2.0, 1.0, 1.0, 2.0], top_k=3) == [0, 1, 4]
    assert _kept([1.0] * 5, top_p=0.5) == [0, 1, 2]
    assert _kept([0.0, -0.0, 0.0], top_k=2) == [0, 1]
    assert _kept([1.0] * 5, min_p=0.99, top_k=2) == [0, 1]
