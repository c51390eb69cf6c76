"""A tokenizer's vocabulary as the grammar libraries want it: the bytes of every id."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.text.tokenizer import Tokenizer

__all__ = ["Vocabulary", "special_spellings", "vocabulary_of"]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    tokens: Sequence[bytes]
    """By id; empty for ids that are no text."""
    special: Mapping[str, int] = field(default_factory=dict[str, int])
    """Spellings of the special tokens: never text, but a structural tag may name them."""
    silent_ids: frozenset[int] = frozenset()
    """Ids that are no text."""
    end_ids: tuple[int, ...] = ()
    encode: Callable[[str], list[int]] = lambda text: []

    @property
    def num_words(self) -> int:
        """int32 words of a mask."""
        return -(-len(self.tokens) // 32)


def special_spellings(tokenizer: Tokenizer) -> dict[str, int]:
    """Longest first, so that the first one found in a text is the right one."""
    found = {token: i for i in tokenizer.special_ids if (token := tokenizer.token(i))}
    return dict(sorted(found.items(), key=lambda item: (-len(item[0]), item[1])))


def vocabulary_of(tokenizer: Tokenizer, *, num_ids: int, end_ids: Collection[int] = ()) -> Vocabulary:
    """
    Args:
        num_ids: ids from here on are never sampled.
        end_ids: what the model's files name as end, besides the tokenizer's own.

    Raises:
        ValueError: nothing ends a text.
    """
    ends = {*tokenizer.eos_ids, *end_ids}
    silent = {*tokenizer.special_ids, *ends}
    tokens: list[bytes] = []
    for token_id in range(num_ids):
        text = b"" if token_id in silent else tokenizer.token_bytes(token_id) or b""
        tokens.append(text)
        if not text:
            silent.add(token_id)
    known = tuple(sorted(end for end in ends if end < num_ids))
    if not known:
        raise ValueError("a grammar needs a token that ends the text, and this model has none")
    return Vocabulary(
        tokens=tokens,
        special={spelling: i for spelling, i in special_spellings(tokenizer).items() if i < num_ids},
        silent_ids=frozenset(silent),
        end_ids=known,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
