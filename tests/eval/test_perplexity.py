from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.eval.perplexity import measure_perplexity, windows
from tests.eval.fake import FakeModel, logprob_of


@given(st.integers(2, 60), st.integers(2, 20), st.integers(1, 20))
def test_every_token_is_scored_once_in_the_first_window_that_can(num_tokens: int, length: int, stride: int) -> None:
    if stride > length:
        with pytest.raises(ValueError, match="--stride"):
            list(windows(num_tokens, length=length, stride=stride))
        return
    found = list(windows(num_tokens, length=length, stride=stride))
    scored = [at for window in found for at in range(window.first, window.end)]
    assert len(set(scored)) == len(scored) and all(window.end - window.begin <= length for window in found)
    for at in range(1, num_tokens):
        begins = [begin for begin in range(0, num_tokens, stride) if begin < at < begin + length]
        assert (at in scored) == bool(begins)  # blocked: the first token of a block has no window
        if begins:
            (window,) = [window for window in found if window.first <= at < window.end]
            assert window.begin == begins[0]


def test_the_value_is_the_definition() -> None:
    text = "abcdefghij"
    model = FakeModel()
    found = measure_perplexity(model, text, length=5, stride=2)
    ids = model.encode(text)
    total = 0.0
    for at in range(1, len(ids)):
        begin = next(begin for begin in range(0, len(ids), 2) if begin < at < begin + 5)
        total += logprob_of(ids[begin:at], ids[at])
    assert found.num_scored == len(ids) - 1
    assert found.value == pytest.approx(math.exp(-total / (len(ids) - 1)))
    assert found.bits_per_byte == pytest.approx(-total / math.log(2) / len(text))
    blocked = measure_perplexity(model, text, length=4, stride=4)
    assert blocked.counts == [3, 3, 2]
    assert measure_perplexity(model, text, length=4, stride=4, max_windows=2).counts == [3, 3]


def test_bad_sizes_are_named() -> None:
    for text, length, problem in (
        ("", 4, "fewer than 2 tokens"),
        ("abc", 1, "--length is 1"),
        ("abc", 999, "takes 64"),
    ):
        with pytest.raises(ValueError, match=problem):
            measure_perplexity(FakeModel(), text, length=length)
