from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling import rows
from headrace.sampling.logprobs import FLOOR, measure, prompt_logprobs
from tests.sampling import twin

values = st.one_of(st.integers(-16, 16).map(lambda n: n / 4), st.just(-math.inf))


@st.composite
def _positions(draw):
    vocab = draw(st.integers(1, 8))
    row = st.tuples(st.lists(values, min_size=vocab, max_size=vocab), st.integers(0, vocab - 1))
    return draw(st.lists(row, min_size=1, max_size=6)), draw(st.integers(0, vocab))


@given(_positions())
def test_measure_equals_twin(case) -> None:
    positions, k = case
    found = measure(torch.tensor([x for x, _ in positions]), torch.tensor([token for _, token in positions]), k)
    host = found.to_host().wait()
    assert host.ids.dtype == np.int32 and host.values.dtype == np.float32 and host.ranks.dtype == np.int32
    for at, (x, token) in enumerate(positions):
        order, logprobs = twin.ranking(x), twin.log_softmax(x)
        ids = [token, *order[:k]]
        assert host.ids[at].tolist() == ids
        assert host.ranks[at] == order.index(token) + 1
        np.testing.assert_allclose(host.values[at], [logprobs[i] for i in ids], atol=1e-5)


@pytest.mark.parametrize("odd", [math.inf, math.nan, -math.inf, 3e38])
def test_values_are_finite(odd: float) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 1] = odd
    logits[1] = odd
    found = measure(logits, torch.tensor([1, 1]), 5).to_host().wait()
    assert np.isfinite(found.values).all() and (found.values >= FLOOR).all()
    if odd == math.inf:
        assert found.values[0, 0] == 0.0 and found.ranks[0] == 1


def test_target_outside_the_vocabulary_has_the_floor() -> None:
    found = measure(torch.zeros(2, 4), torch.tensor([-1, 4]), 1).to_host().wait()
    assert found.ids[:, 0].tolist() == [-1, 4]
    assert found.values[:, 0].tolist() == [FLOOR, FLOOR] and found.ranks.tolist() == [4, 4]
    assert found.ids[:, 1].tolist() == [0, 0]


@settings(max_examples=30)
@given(st.integers(0, 9), st.integers(0, 7), st.integers(1, 60), st.integers(0, 2**31))
def test_prompt_logprobs_do_not_depend_on_chunks(num: int, k: int, max_elements: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab_size, num_valid = 6, 5
    logits = torch.randn(num, vocab_size, generator=generator)
    targets = torch.randint(0, num_valid, (num,), generator=generator)
    widest = 0

    def logits_of(part: slice) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, part.stop - part.start)
        return logits[part].clone()

    with mock.patch.object(rows, "MAX_CHUNK_ELEMENTS", max_elements):
        found = prompt_logprobs(logits_of, targets, k, vocab_size=vocab_size, num_valid_ids=num_valid).wait()
    assert widest <= max(1, max_elements // vocab_size)
    assert found.ids.shape == found.values.shape == (num, 1 + min(k, num_valid)) and found.ranks.shape == (num,)
    for at in range(num):
        x = twin.raw_logits(logits[at].tolist(), num_valid)
        order, logprobs = twin.ranking(x), twin.log_softmax(x)
        ids = [int(targets[at]), *order[: min(k, num_valid)]]
        assert found.ids[at].tolist() == ids and found.ranks[at] == order.index(ids[0]) + 1
        np.testing.assert_allclose(found.values[at], [logprobs[i] for i in ids], atol=1e-5)
