"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from headrace.text.tokenizer import Tokenizer
from headrace.types import Logprobs

__all__ = ["FLOOR", "chat_logprobs", "completion_logprobs", "prompt_logprobs", "token_name"]

FLOOR = -9999.0
"""What stands for minus infinity, which JSON can't carry."""


def floored(value: float) -> float:
    return value if value > FLOOR else FLOOR  # NaN compares false and becomes the floor too


def token_name(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The token's own text; a piece of a character is written as `bytes:` and its hexadecimal bytes."""
    assert tokenizer is not None
    data = tokenizer.token_bytes(token_id) or b""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[Logprobs], count: int) -> list[dict[str, Any]]:
    """The `content` list: each position's chosen token with the `count` likeliest."""
    content: list[dict[str, Any]] = []
    for entry in entries:
        names = [_named(tokenizer, token_id, value) for token_id, value in zip(entry.ids, entry.values)]
        content.append({**names[0], "top_logprobs": [names[at] for at in ranked(entry)[:count]]})
    return content


def ranked(entry: Logprobs) -> list[int]:
    """Positions within an entry, likeliest token first."""
    return sorted(range(len(entry.ids)), key=lambda at: entry.ranks[at])


def _named(tokenizer: Tokenizer | None, token_id: int, value: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": floored(value),
        "bytes": list((tokenizer.token_bytes(token_id) if tokenizer else None) or b""),
    }


def completion_logprobs(
    tokenizer: Tokenizer | None,
    ids: Sequence[int],
    entries: Sequence[Logprobs | None],
    count: int,
    *,
    offset: int,
    hidden: frozenset[int],
) -> dict[str, Any]:
    """The four parallel lists. Different tokens of one name are told apart by a suffix ` (id N)`.

    Args:
        offset: characters of the choice's text before the first of these tokens.
        hidden: ids that have no part in the text.
    """
    assert tokenizer is not None
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entry in zip(ids, entries):
        tokens.append(token_name(tokenizer, token_id))
        offsets.append(offset)
        if token_id not in hidden:
            offset += len(utf8.decode(tokenizer.token_bytes(token_id) or b""))
        values.append(None if entry is None else floored(entry.values[0]))
        tops.append(None if entry is None else _top(tokenizer, entry, count))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops if count else None, "text_offset": offsets}


def _top(tokenizer: Tokenizer | None, entry: Logprobs, count: int) -> dict[str, float]:
    """The `count` likeliest and the chosen token."""
    kept = sorted({*ranked(entry)[:count], 0}, key=lambda at: entry.ranks[at])
    found: dict[str, float] = {}
    for at in kept:
        name = token_name(tokenizer, entry.ids[at])
        if name in found:
            name = f"{name} (id {entry.ids[at]})"
        found[name] = floored(entry.values[at])
    return found


def prompt_logprobs(tokenizer: Tokenizer | None, entries: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
    """By token id, one entry for each prompt token; the first has none."""
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": floored(value),
                "rank": rank,
                "decoded_token": token_name(tokenizer, token_id),
            }
            for token_id, value, rank in zip(entry.ids, entry.values, entry.ranks)
        }
        for entry in entries
    ]
