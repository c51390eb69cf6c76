from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling.verify import verify


def _twin(tokens: list[int], drafts: list[int], done: list[bool]) -> int:
    accepted = 1
    for draft in drafts:
        if tokens[accepted - 1] != draft or done[accepted - 1]:
            break
        accepted += 1
    return accepted


@st.composite
def _batches(draw):
    k = draw(st.integers(0, 5))
    token = st.integers(0, 1)
    row = st.tuples(
        st.lists(token, min_size=k + 1, max_size=k + 1),
        st.lists(token, min_size=k, max_size=k),
        st.integers(0, k),
        st.lists(st.sampled_from([False, False, False, True]), min_size=k + 1, max_size=k + 1),
    )
    return draw(st.lists(row, min_size=1, max_size=6))


@given(_batches())
def test_equals_twin(rows) -> None:
    tokens, drafts, num_drafts, done = (list(column) for column in zip(*rows))
    k = len(drafts[0])
    drafts_tensor = torch.tensor(drafts, dtype=torch.int64).view(len(rows), k)
    args = torch.tensor(tokens), drafts_tensor, torch.tensor(num_drafts)
    never = [False] * (k + 1)
    assert verify(*args).tolist() == [_twin(t, d[:n], never) for t, d, n in zip(tokens, drafts, num_drafts)]
    expected = [_twin(t, d[:n], e) for t, d, n, e in zip(tokens, drafts, num_drafts, done)]
    assert verify(*args, done=torch.tensor(done)).tolist() == expected
