"""Tokens so far on the host, for the few slots whose rules look at sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


class LateTokens:
    """The tokens of one commit, still on the device; read back once, when first asked for.

    Reading waits for the device, so it happens when the next token is chosen, not at the commit.
    """

    __slots__ = ("_num_accepted", "_rows", "_tokens")

    def __init__(self, tokens: Tensor, num_accepted: Tensor | None) -> None:
        self._tokens = tokens.clone()  # [rows, n]; the caller may write to its own
        self._num_accepted = None if num_accepted is None else num_accepted.clone()  # [rows]
        self._rows: list[list[int]] | None = None

    def row(self, row: int) -> list[int]:
        if self._rows is None:
            tokens: list[list[int]] = self._tokens.tolist()
            if self._num_accepted is not None:
                counts: list[int] = self._num_accepted.tolist()
                tokens = [row_tokens[:count] for row_tokens, count in zip(tokens, counts)]
            self._rows = tokens
        return self._rows[row]


class TokenHistory:
    """One sequence, prompt and output, with an index of its n-grams."""

    def __init__(self, tokens: Iterable[int], *, prompt_len: int, ngram_size: int = 0) -> None:
        self._tokens = list(tokens)
        self._prompt_len = prompt_len
        self._ngram_size = ngram_size
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self._num_indexed = 0
        self._late: list[tuple[LateTokens, int]] = []

    def add_late(self, late: LateTokens, row: int) -> None:
        self._late.append((late, row))

    @property
    def tokens(self) -> list[int]:
        """Every token committed so far. Waits for the device when the last ones are still there."""
        for late, row in self._late:
            self._tokens.extend(late.row(row))
        self._late.clear()
        return self._tokens

    def repeating(self, pending: Sequence[int]) -> set[int]:
        """Tokens that would complete an n-gram which prompt, output and `pending` already hold."""
        size = self._ngram_size
        tokens = self.tokens
        if size == 0 or len(tokens) + len(pending) < size:
            return set()
        self._index(tokens)
        # the n-grams that end within `pending`, and the tail that the next token would complete
        recent = [*tokens[max(0, len(tokens) - size + 1) :], *pending]
        tail = tuple(recent[len(recent) - size + 1 :])
        banned = set(self._followers.get(tail, ()))
        for start in range(len(recent) - size + 1):
            if tuple(recent[start : start + size - 1]) == tail:
                banned.add(recent[start + size - 1])
        return banned

    def completing(self, words: Sequence[Sequence[int]], pending: Sequence[int]) -> list[int]:
        """Last tokens of the `words` whose other tokens are the latest generated ones."""
        longest = max((len(word) for word in words), default=0)
        tokens = self.tokens
        recent = [*tokens[max(self._prompt_len, len(tokens) - longest) :], *pending]
        return [
            word[-1]
            for word in words
            if len(word) - 1 <= len(recent) and recent[len(recent) - len(word) + 1 :] == list(word[:-1])
        ]

    def _index(self, tokens: list[int]) -> None:
        size = self._ngram_size
        for end in range(max(self._num_indexed, size - 1), len(tokens)):
            self._followers.setdefault(tuple(tokens[end - size + 1 : end]), set()).add(tokens[end])
        self._num_indexed = len(tokens)
