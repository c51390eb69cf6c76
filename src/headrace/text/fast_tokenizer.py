"""A tokenizer on the `tokenizers` library, and what its decoder does, said as a `DecodeRule`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import tokenizers

from headrace.text.byte_level import bytes_of_token
from headrace.text.tokenizer import DecodeRule, encode_utf8

__all__ = ["FastTokenizer", "add_tokens"]


class FastTokenizer:
    """A `Tokenizer` over a `tokenizers.Tokenizer`, which it owns.

    `vocab_size` is one more than the highest id; counted if not given. `add_bos` and `add_eos` say what
    `add_special_tokens` adds; with both None the backend's own post-processor does it.
    """

    is_fast = True

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        # Not the count of tokens: ids may have holes.
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1 if vocab_size is None else vocab_size
        self.special_tokens: Mapping[str, str] = dict(special_tokens)
        self.bos_id = self._id_of("bos_token")
        eos_id = self._id_of("eos_token")
        self.eos_ids = frozenset(() if eos_id is None else (eos_id,))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.decode_rule = decode_rule(backend)
        self._leads_with = [self.bos_id] if add_bos and self.bos_id is not None else []
        self._ends_with = [eos_id] if add_eos and eos_id is not None else []
        self._uses_post_processor = add_bos is None and add_eos is None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        add_by_backend = add_special_tokens and self._uses_post_processor
        try:
            # A batch of one: unlike `encode` it lets other threads run meanwhile, and it finds no offsets.
            ids = self.backend.encode_batch_fast([text], add_special_tokens=add_by_backend)[0].ids
        except (TypeError, UnicodeEncodeError):
            encode_utf8(text)  # names the character, if that was it
            raise
        return [*self._leads_with, *ids, *self._ends_with] if add_special_tokens else ids

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_bytes(self, token_id: int) -> bytes | None:
        token = self.token(token_id)
        if token is None:
            return None
        rule = self.decode_rule
        if rule is None:
            return token.encode("utf-8")
        if rule.kind == "bytes":
            return bytes_of_token(token)
        if rule.drop_in_first:
            token = token.replace(rule.drop_in_first, " ")  # as any token but the first
        piece = rule.piece(token)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8")

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)


def add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str | tokenizers.AddedToken]) -> None:
    """Registers tokens to be matched whole in text; `AddedToken.special` says of which kind."""
    cast("Any", backend).add_tokens(list(tokens))


def decode_rule(backend: tokenizers.Tokenizer) -> DecodeRule | None:
    """What the backend's decoder does, or None if it is of a kind that depends on more than one token at a time."""
    if backend.decoder is None:
        return None
    # The decoder's classes don't show their settings; their serialised form does.
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRule("bytes")
    if kinds == ["Metaspace"]:
        return _metaspace_rule(steps[0])
    return _pieces_rule(steps)


def _metaspace_rule(step: dict[str, Any]) -> DecodeRule:
    mark = step["replacement"]
    keeps_first = step.get("prepend_scheme", "always") == "never"
    return DecodeRule("pieces", replacements=((mark, " "),), drop_in_first="" if keeps_first else mark)


def _pieces_rule(steps: list[dict[str, Any]]) -> DecodeRule | None:
    """Any number of Replace, then ByteFallback, Fuse and Strip at the start, each optional, in this order."""
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace":
        step = rest.pop(0)
        if "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    has_byte_tokens = bool(rest) and rest[0]["type"] == "ByteFallback"
    if has_byte_tokens:
        rest.pop(0)
    is_fused = bool(rest) and rest[0]["type"] == "Fuse"
    if is_fused:
        rest.pop(0)
    strip_left, num_strip_left = "", 0
    if is_fused and rest and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        step = rest.pop(0)
        strip_left, num_strip_left = step["content"], step["start"]
    if rest or not steps:
        return None
    return DecodeRule(
        "pieces",
        replacements=tuple(replacements),
        has_byte_tokens=has_byte_tokens,
        strip_left=strip_left,
        num_strip_left=num_strip_left,
    )
