"""The limit on a request's reasoning, and how the marks around reasoning are found in token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.config.serving import MAX_THINKING_BUDGET
from headrace.front.errors import RequestError
from headrace.server.bodies import ChatBody, GenerationBody
from headrace.text.tokenizer import Tokenizer
from headrace.types import Marker

__all__ = ["BUDGET", "Budget", "Spellings", "budget_of", "is_left_open", "spellings_of"]

BUDGET = "thinking_token_budget"
MAX_BLANK = 256


class Budget(NamedTuple):
    """Of one request."""

    num_tokens: int
    is_asked_for: bool
    """By the request itself; otherwise it follows from the effort and gives way to what doesn't go with it."""


class Spellings(NamedTuple):
    """Marks in the ids of one tokenizer."""

    markers: Mapping[str, Marker]
    """By their text."""
    blank_ids: tuple[int, ...]
    """Tokens of white space, the shortest ones."""


def budget_of(body: GenerationBody, budgets: Mapping[str, int]) -> Budget | None:
    """`budgets` are the server's, by effort. Raises RequestError."""
    asked = body.thinking_token_budget
    if asked is not None:
        if not 0 <= asked <= MAX_THINKING_BUDGET:
            raise RequestError(f"{BUDGET} must be from 0 to {MAX_THINKING_BUDGET}, got {asked}", param=BUDGET)
        return Budget(asked, True)
    if not isinstance(body, ChatBody) or body.use_beam_search:
        return None
    effort = (body.thinking.effort if body.thinking is not None else None) or body.reasoning_effort or "default"
    return Budget(budgets[effort], False) if effort in budgets else None


def is_left_open(prompt: str, begin: str, end: str) -> bool:
    """Whether a prompt of any form ends inside of reasoning that it has begun."""
    last = prompt.rfind(begin)
    return last >= 0 and prompt.rfind(end) < last


def spellings_of(texts: Sequence[str], tokenizer: Tokenizer) -> Spellings:
    """Looks at the whole vocabulary, which takes a moment.

    A mark of special tokens has one spelling. One of ordinary text may have tokens at its ends that hold more: text
    before it, white space behind it.
    """
    pieces = {i: piece for i in range(tokenizer.vocab_size) if (piece := tokenizer.token_bytes(i))}
    special = tokenizer.special_ids
    markers = {text: _marker(tokenizer.encode(text, add_special_tokens=False), pieces, special) for text in texts}
    blank = [i for i, piece in pieces.items() if piece.isspace() and i not in special]
    blank.sort(key=lambda i: (len(pieces[i]), i))
    return Spellings(markers, tuple(blank[:MAX_BLANK]))


def _marker(ids: list[int], pieces: Mapping[int, bytes], special: frozenset[int]) -> Marker:
    places = [[token] for token in ids]
    first, last = ids[0], ids[-1]
    if first not in special and (start := pieces.get(first)):
        places[0] += [i for i, piece in pieces.items() if piece.endswith(start) and i != first]
    if last not in special and (end := pieces.get(last)):
        rest = [i for i, piece in pieces.items() if piece.startswith(end) and piece[len(end) :].isspace()]
        places[-1] += [i for i in rest if i not in places[-1]]
    return tuple(map(tuple, places))
