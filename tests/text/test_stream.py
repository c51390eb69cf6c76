from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stream import TextDelta, TextStream
from headrace.text.tokenizer import ByteTokenizer
from headrace.types import FinishReason
from tests.text.tiny_tokenizers import byte_level

TOKENIZER = ByteTokenizer()
EOS = 257


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_stop_string_ends_the_stream_and_says_which_tokens_count() -> None:
    stream = TextStream(TOKENIZER, stop_strings=["END"])
    assert stream.push(ids("abE")) == TextDelta("ab", num_tokens_kept=3)
    assert stream.push(ids("NDxyz")) == TextDelta("", True, "stop", "END", num_tokens_kept=2)
    assert stream.finished
    assert stream.push(ids("more")) == TextDelta("", True, "stop", "END", num_tokens_kept=0)
    assert stream.push([EOS], finish="stop", stop_token=EOS) == TextDelta("", True, "stop", "END", num_tokens_kept=0)


def test_the_end_releases_what_is_held_back() -> None:
    stream = TextStream(TOKENIZER, stop_strings=["END"])
    assert stream.push(ids("abEN")).text == "ab"
    assert stream.push(ids("é")[:1], finish="length") == TextDelta("EN\ufffd", True, "length", None, 1)


def test_an_empty_last_push() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push(ids("日")[:2]).text == ""
    assert stream.push([], finish="abort") == TextDelta("\ufffd", True, "abort", None, 0)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abz")])
def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(include: bool, text: str) -> None:
    stream = TextStream(TOKENIZER, include_stop_str=include)
    z = ids("z")[0]
    assert stream.push(ids("abz"), finish="stop", stop_token=z) == TextDelta(text, True, "stop", z, 3)


def test_eos_is_no_stop_reason() -> None:
    stream = TextStream(TOKENIZER, eos_ids=frozenset({EOS}), skip_special_tokens=False)
    assert stream.push([*ids("a"), EOS], finish="stop", stop_token=EOS) == TextDelta("a", True, "stop", None, 2)


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "timeout", "error"])
def test_a_stop_string_completed_at_the_end_cuts_the_text_in_any_case(reason: FinishReason) -> None:
    stream = TextStream(TOKENIZER, stop_strings=["b"])
    expected = "stop" if reason in ("stop", "length") else reason
    assert stream.push(ids("ab"), finish=reason) == TextDelta("a", True, expected, "b", 2)


def test_min_tokens_counts_generated_tokens_before_a_stop_string() -> None:
    """behaviours.md row 9: exactly `min_tokens` tokens before anything can end the request."""
    stream = TextStream(TOKENIZER, stop_strings=["b"], min_tokens=2)
    assert stream.push(ids("ab")) == TextDelta("ab", num_tokens_kept=2)
    assert stream.push(ids("b")) == TextDelta("", True, "stop", "b", 1)
    stream = TextStream(TOKENIZER, stop_strings=["bc"], min_tokens=2)
    assert stream.push(ids("abcbc")) == TextDelta("abc", True, "stop", "bc", 5)


@settings(max_examples=300)
@given(
    text=st.text(alphabet="abé日", max_size=25),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
    data=st.data(),
)
def test_streamed_equals_all_at_once_for_every_split(
    text: str, stops: list[str], min_tokens: int, include: bool, data: st.DataObject
) -> None:
    for tokenizer in (TOKENIZER, byte_level()):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        options = {"stop_strings": stops, "min_tokens": min_tokens, "include_stop_str": include}
        whole = collect(TextStream(tokenizer, **options), [tokens])
        cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=10)))
        pieces = [tokens[start:stop] for start, stop in pairwise([0, *cuts, len(tokens)])]
        assert collect(TextStream(tokenizer, **options), pieces) == whole
        if not stops:
            assert whole[0] == tokenizer.decode(tokens) and whole[1] == "length"


def collect(stream: TextStream, pieces: list[list[int]]) -> tuple[str, object, object, int]:
    """(text, finish reason, stop reason, tokens kept) of the pieces and an empty end."""
    deltas = [stream.push(piece) for piece in pieces]
    deltas.append(stream.push([], finish="length"))
    num_kept = sum(delta.num_tokens_kept for delta in deltas)
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason, num_kept
