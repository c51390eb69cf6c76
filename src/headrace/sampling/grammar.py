"""What a grammar offers the engine: compiled once, a matcher for each sequence, masks as packed bits.

The engine is handed a compiler; which library is behind it, and how text becomes tokens, are no matter of this room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from headrace.seam import Ints
from headrace.types import Grammar

__all__ = ["CompiledGrammar", "GrammarCompiler", "Masks", "Matcher"]


class Matcher(Protocol):
    """How far one sequence has come in its grammar."""

    def advance(self, token: int) -> bool:
        """One more token; False: it can't come here, and nothing is said about what follows."""
        ...

    @property
    def can_end(self) -> bool:
        """Whether the text so far is whole."""
        ...


class CompiledGrammar(Protocol):
    def matcher(self) -> Matcher:
        """At the beginning."""
        ...


class GrammarCompiler(Protocol):
    """Safe to call from several threads, but for one matcher at a time."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ends a sequence that has no stop ids of its own."""
        ...

    @property
    def silent_ids(self) -> frozenset[int]:
        """Tokens without text: a stop id among them can only mean the end."""
        ...

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """May take long. Raises ValueError: no such grammar, or one too large; the message says where."""
        ...

    def fill(self, matchers: Sequence[Matcher], rows: Ints) -> dict[int, str]:
        """Which tokens may come next, one bit each, lowest first; ends are left out.

        Args:
            rows: [matchers, words], contiguous; every bit is written.

        Returns:
            by row, what went wrong there.
        """
        ...


class Masks(NamedTuple):
    """What the grammars of a call allow."""

    rows: Tensor  # [n] int64, rows of the call
    bits: Tensor  # [n, words] int32
