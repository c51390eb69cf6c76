"""Where reasoning begins and ends, told from tokens alone."""

from __future__ import annotations

import pytest

from headrace.engine.thinking import Marked, Thinking
from headrace.types import ThinkingCap

BEGIN = ((1,), (2, 20), (3, 30))
END = ((4, 40), (5,), (6, 60))


def cap(max_tokens: int, **changes: object) -> ThinkingCap:
    fields = {"max_tokens": max_tokens, "ends": (END,), "begin": BEGIN, "blank_ids": (9,), **changes}
    return ThinkingCap(**fields)  # pyright: ignore[reportArgumentType]


def test_a_marker_and_its_spellings() -> None:
    marked = Marked(END)
    assert marked.next_token == 4 and not marked.push(40) and marked.next_token == 5
    assert not marked.push(4) and marked.num_matched == 1
    assert not marked.push(5) and marked.next_token == 6
    assert marked.push(60)
    marked.forget()
    assert marked.num_matched == 0
    assert not any(Marked(()).push(token) for token in range(9))


def test_the_limit_counts_what_lies_between() -> None:
    thinking = Thinking(cap(3))
    for token in (9, 1, 20, 3):
        assert thinking.forced is None
        thinking.push(token)
    for token in (7, 7, 7):
        assert thinking.forced is None
        thinking.push(token)
    for token in (4, 5, 6):
        assert thinking.forced == token
        thinking.push(token)
    assert thinking.forced is None and not thinking.is_over
    for token in (1, 2, 3):  # again, at once: nothing is left for it
        thinking.push(token)
    assert thinking.forced == 4


def test_a_marker_under_way_is_gone_on_with() -> None:
    thinking = Thinking(cap(2, is_open=True))
    thinking.push(7)
    thinking.push(40)
    assert thinking.forced == 5


@pytest.mark.parametrize("is_anywhere", [False, True])
def test_a_begin_in_the_middle_of_an_answer(is_anywhere: bool) -> None:
    thinking = Thinking(cap(0, is_anywhere=is_anywhere))
    for token in (8, 1, 2, 3):
        thinking.push(token)
    assert thinking.is_over is not is_anywhere
    assert thinking.forced == (4 if is_anywhere else None)


def test_other_ends() -> None:
    thinking = Thinking(cap(2, is_open=True, ends=(END, ((8,),))))
    for token in (7, 8, 7, 7):
        thinking.push(token)
    assert thinking.is_over
