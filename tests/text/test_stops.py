from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.text.stops import StopChecker


def naive(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The slow twin: looks at the whole text, one character more at a time."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None, list[str]]:
    checker = StopChecker(stops, include_stop_str=include)
    released: list[str] = []
    matched: str | None = None
    for piece in pieces:
        text, matched = checker.push(piece)
        released.append(text)
    released.append(checker.flush())
    return "".join(released), matched, released


LETTERS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=600)
@given(text=LETTERS, stops=STOPS, data=st.data(), include=st.booleans())
@example(text="xDEFGHIJy", stops=["DEFGHIJ"], data=None, include=False)
def test_equals_the_naive_twin_for_every_split(
    text: str, stops: list[str], data: st.DataObject | None, include: bool
) -> None:
    cuts = [*range(len(text))] if data is None else data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    pieces = [text[start:stop] for start, stop in pairwise([0, *sorted(cuts), len(text)])]
    released, matched, parts = run(pieces, stops, include=include)
    assert (released, matched) == naive(text, stops, include=include)
    if matched is None:
        # What is held back is only ever the longest end that may still become a stop string.
        shown = ""
        for piece, part in zip(pieces, parts):
            shown += part
            seen = "".join(pieces[: pieces.index(piece) + 1]) if pieces.count(piece) == 1 else None
            if seen is not None and not include:
                assert seen[len(shown) :] == max(
                    (seen[i:] for i in range(len(seen) + 1) if any(s.startswith(seen[i:]) for s in stops)), key=len
                )


def test_nothing_of_a_stop_string_is_sent_before_it_is_complete() -> None:
    """behaviours.md row 3"""
    _, matched, parts = run(["abc DEF", "G", "HI", "J and more"], ["DEFGHIJ"])
    assert matched == "DEFGHIJ" and parts == ["abc ", "", "", "", ""]


def test_a_ruled_out_prefix_is_released() -> None:
    assert run(["abc DEF", "G", "x", "DEF"], ["DEFGHIJ"])[2] == ["abc ", "", "DEFGx", "", "DEF"]


def test_the_cut_is_inside_a_token() -> None:
    assert run(["one. two. three"], [". t"])[:2] == ("one", ". t")


def test_the_first_to_complete_wins_and_of_several_the_longest() -> None:
    assert run(["abcd"], ["abcd", "bc"])[:2] == ("a", "bc")
    assert run(["xabc"], ["c", "bc", "abc"])[:2] == ("x", "abc")
    assert run(["xabc"], ["abc", "c"])[:2] == ("x", "abc")


def test_include_stop_str_sends_text_at_once_and_ends_after_the_string() -> None:
    assert run(["ab", "cd", "ef"], ["bcd"], include=True)[2] == ["ab", "cd", "", ""]


def test_text_before_arming_takes_no_part() -> None:
    checker = StopChecker(["abc"])
    assert checker.push("zab", armed=False) == ("zab", None)
    assert checker.push("c", armed=True) == ("c", None), "its beginning came before"
    assert checker.push("a") == ("", None)
    assert checker.push("b", armed=False) == ("ab", None)
    assert checker.push("cabc!") == ("c", "abc")
    assert checker.push("more") == ("", "abc")
    assert checker.flush() == ""


def test_without_strings_everything_passes() -> None:
    checker = StopChecker([])
    assert checker.push("abc") == ("abc", None) and checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop: a stop string is empty"):
        StopChecker(["a", ""])


def seconds(num_characters: int, stops: list[str]) -> float:
    best = float("inf")
    for _ in range(2):
        checker = StopChecker(stops)
        start = time.process_time()
        for _ in range(num_characters // 4):
            checker.push("aaab")
        best = min(best, time.process_time() - start)
    return best


def test_cost_is_flat_in_output_length_and_in_the_number_of_strings() -> None:
    one = seconds(20_000, ["aaaac"])
    assert seconds(160_000, ["aaaac"]) < 20 * max(one, 0.005)
    many = [f"aaa{number}z" for number in range(2000)]
    assert seconds(20_000, many) < 5 * max(one, 0.01)
    assert seconds(20_000, ["a" * 2000 + "c"]) < 5 * max(one, 0.01)
