"""Random texts that a compiled grammar lets pass, token by token, without a model."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from headrace.text.grammars.vocabulary import Vocabulary
from headrace.types import Grammar

PIECES = [
    b'{"',
    b'":',
    b'",',
    b'"}',
    b'": "',
    b"abc",
    b"12",
    b"true",
    b"null",
    b"[]",
    b"\\n",
    b"\\u00",
    b".5",
    b"e1",
    b"-1",
]
TOKENS = [bytes([value]) for value in range(256)] + PIECES + [b"", b""]
CALL, END = len(TOKENS) - 2, len(TOKENS) - 1
VOCABULARY = Vocabulary(
    tokens=TOKENS,
    special={"<|call|>": CALL, "<|end|>": END},
    silent_ids=frozenset({CALL, END}),
    end_ids=(END,),
    encode=lambda text: list(text.encode()),
)


class Walked(NamedTuple):
    text: bytes
    is_whole: bool


def walk(compiler: Any, compiled: Any, *, seed: int, most: int = 200) -> Walked:
    """Ends where it may, at random. Every token is one that the mask lets pass; none is an end or past the last."""
    rng = random.Random(seed)
    matcher = compiled.matcher()
    bits = np.full((1, VOCABULARY.num_words), -1, np.int32)
    text = b""
    for _ in range(most):
        assert compiler.fill([matcher], bits) == {}
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert END not in allowed and max(allowed, default=0) < len(TOKENS)
        if matcher.can_end and (not allowed or rng.random() < 0.4):
            return Walked(text, True)
        assert allowed, f"stuck after {text!r}"
        token = rng.choices(allowed, [_weight(TOKENS[token]) for token in allowed])[0]
        assert matcher.advance(token), f"{TOKENS[token]!r} was let pass after {text!r}"
        text += TOKENS[token]
    return Walked(text, False)


def _weight(token: bytes) -> float:
    """Blanks seldom, so that texts come to an end."""
    return 0.02 if token.isspace() else 3.0 if token[:1] in b'"}]' else 1.0


def accepts(compiler: Any, grammar: Grammar, text: str | list[int]) -> bool:
    """Whether the whole text matches; each byte must be in the mask exactly when it can come."""
    matcher = compiler.compile(grammar).matcher()
    bits = np.zeros((1, VOCABULARY.num_words), np.int32)
    for token in text.encode() if isinstance(text, str) else text:
        compiler.fill([matcher], bits)
        if not bits[0, token // 32] >> (token % 32) & 1:
            return False
        assert matcher.advance(token)
    return matcher.can_end
