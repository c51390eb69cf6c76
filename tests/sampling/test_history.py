from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling.history import LateTokens, TokenHistory

tokens_of = st.lists(st.integers(0, 3), max_size=12)


def _repeats(tokens: list[int], size: int) -> set[int]:
    """Tokens that would end an n-gram which stands in `tokens` already."""
    grams = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    return {token for token in range(4) if [*tokens, token][-size:] in grams and len(tokens) + 1 >= size}


@given(st.lists(tokens_of, min_size=1, max_size=4), tokens_of, st.integers(1, 4))
def test_repeating_equals_search(pieces: list[list[int]], pending: list[int], size: int) -> None:
    history = TokenHistory(pieces[0], prompt_len=len(pieces[0]), ngram_size=size)
    so_far = list(pieces[0])
    for piece in [[], *pieces[1:]]:
        if piece:
            history.add_late(LateTokens(torch.tensor([piece]), None), 0)
        so_far += piece
        assert history.repeating(pending) == _repeats(so_far + pending, size)
        assert history.repeating([]) == _repeats(so_far, size)


@given(tokens_of, tokens_of, tokens_of, st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), max_size=6))
def test_completing_equals_search(prompt: list[int], output: list[int], pending: list[int], words: list) -> None:
    history = TokenHistory(prompt + output, prompt_len=len(prompt))
    generated = output + pending
    expected = [word[-1] for word in words if [*generated, 9][-len(word) : -1] == word[:-1]]
    assert history.completing(words, pending) == expected


def test_late_tokens_are_read_once_and_cut() -> None:
    device = torch.tensor([[1, 2, 3], [4, 5, 6]])
    late = LateTokens(device, torch.tensor([2, 3]))
    device.zero_()  # the caller goes on with its own tensor
    history = TokenHistory([9], prompt_len=1)
    history.add_late(late, 0)
    assert history.tokens == [9, 1, 2]
    assert late.row(1) == [4, 5, 6]
