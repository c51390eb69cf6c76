"""Tokenising what may be far too long: a text of 60 MB takes a minute and gigabytes, which its refusal needn't."""

from __future__ import annotations

from headrace.text.tokenizer import Tokenizer, encode_prompt

__all__ = ["TooLong", "encode_at_most", "encode_tail"]

MARGIN = 2
"""Tokens at a cut may differ from those of the whole text: the part has to have twice as many as would matter."""
CHARACTERS = 8
"""Of a token, seldom more: texts of as many as may matter are tokenised at once, and most of the longer ones refused
by the first part."""
LEAST_CHARACTERS = 1 << 16


class TooLong(ValueError):
    """A text has more than `most` tokens, how many is unknown."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the text has more than {most} tokens: shorten it")
        self.most = most


def encode_at_most(tokenizer: Tokenizer, text: str, most: int, *, add_special_tokens: bool) -> list[int]:
    """Ids of a raw prompt; they may be more than `most`. Raises TooLong when they surely are, and are many."""
    size = _first_part(most)
    while size < len(text):
        if len(tokenizer.encode(text[:size], add_special_tokens=False)) > MARGIN * most:
            raise TooLong(most)
        size *= 2
    return encode_prompt(tokenizer, text, add_special_tokens=add_special_tokens)


def encode_tail(tokenizer: Tokenizer, text: str, least: int, *, add_special_tokens: bool) -> list[int]:
    """Ids of a raw prompt of which only the last `least` matter; others may be missing before them."""
    size = _first_part(least)
    while size < len(text):
        ids = tokenizer.encode(text[-size:], add_special_tokens=False)
        if len(ids) > MARGIN * least:
            return ids
        size *= 2
    return encode_prompt(tokenizer, text, add_special_tokens=add_special_tokens)


def _first_part(num_tokens: int) -> int:
    return max(LEAST_CHARACTERS, CHARACTERS * MARGIN * num_tokens)
