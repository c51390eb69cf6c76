"""What is far too long is refused, or cut, by a part of it."""

from __future__ import annotations

import pytest

from headrace.text import bounded
from headrace.text.bounded import TooLong, encode_at_most, encode_tail
from headrace.text.tokenizer import ByteTokenizer


class Counting(ByteTokenizer):
    """Of a byte a token: counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.given.append(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "LEAST_CHARACTERS", 16)


@pytest.mark.parametrize("length", [3, 16, 160, 161, 319])
def test_what_may_fit_is_encoded_whole(length: int) -> None:
    tokenizer, text = Counting(), "ä" * (length // 2) + "x" * (length % 2)
    ids = encode_at_most(tokenizer, text, 10_000, add_special_tokens=True)
    assert ids == ByteTokenizer().encode(text) and tokenizer.given == [len(text)]


def test_what_is_far_too_long_is_refused_by_its_first_part() -> None:
    tokenizer = Counting()
    with pytest.raises(TooLong, match="more than 10 tokens"):
        encode_at_most(tokenizer, "x" * 1_000_000, 10, add_special_tokens=True)
    assert tokenizer.given == [160]


def test_a_little_too_long_is_the_callers_to_say() -> None:
    assert len(encode_at_most(Counting(), "x" * 15, 10, add_special_tokens=False)) == 15


def test_tokens_of_many_characters_take_more_parts() -> None:
    class Wide(Counting):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text, add_special_tokens=add_special_tokens)[::40]

    tokenizer = Wide()
    assert len(encode_at_most(tokenizer, "x" * 400, 10, add_special_tokens=False)) == 10
    assert tokenizer.given == [160, 320, 400]
    with pytest.raises(TooLong):
        encode_at_most(tokenizer, "x" * 100_000, 10, add_special_tokens=False)
    assert sum(tokenizer.given) < 4_000


@pytest.mark.parametrize("length", [5, 100, 4_000])
def test_the_last_tokens_are_those_of_the_whole_text(length: int) -> None:
    tokenizer = Counting()
    text = "".join(chr(97 + at % 26) for at in range(length))
    ids = encode_tail(tokenizer, text, 10, add_special_tokens=False)
    assert ids[-10:] == ByteTokenizer().encode(text, add_special_tokens=False)[-10:]
    assert sum(tokenizer.given) <= 260
