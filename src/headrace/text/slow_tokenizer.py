"""Tokenizers of `transformers`: for folders without a tokenizer.json, and for `tokenizer_mode: slow`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from headrace.hub.pretrained import load_auto_tokenizer
from headrace.text.fast_tokenizer import FastTokenizer
from headrace.text.tokenizer import DecodeRule, Tokenizer, encode_utf8

__all__ = ["SlowTokenizer", "from_transformers", "load_converted_tokenizer"]

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_converted_tokenizer(folder: Path, *, use_fast: bool) -> Tokenizer:
    """What transformers makes of the folder: on the `tokenizers` library if it can be converted to that, else slow.

    Raises:
        ModelError: transformers is missing or refuses the folder.
    """
    return from_transformers(load_auto_tokenizer(folder, use_fast=use_fast), use_fast=use_fast)


def from_transformers(theirs: Any, *, use_fast: bool = True) -> Tokenizer:
    """A `Tokenizer` of a tokenizer object of transformers, which is left as it is."""
    backend = getattr(theirs, "backend_tokenizer", None)
    if use_fast and isinstance(backend, tokenizers.Tokenizer):
        return FastTokenizer(copy.deepcopy(backend), special_tokens=_special_tokens(theirs))
    return SlowTokenizer(theirs)


class SlowTokenizer:
    """A `Tokenizer` over one of transformers. Only its `decode` knows how text comes of ids."""

    is_fast = False
    decode_rule: DecodeRule | None = None

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.special_tokens: Mapping[str, str] = _special_tokens(theirs)
        self.bos_id: int | None = theirs.bos_token_id
        self.eos_ids = frozenset(() if theirs.eos_token_id is None else (int(theirs.eos_token_id),))
        self.special_ids = frozenset(int(token_id) for token_id in theirs.all_special_ids)
        self.vocab_size = int(max(theirs.get_vocab().values(), default=-1)) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encode_utf8(text)
        return [int(token_id) for token_id in self._theirs.encode(text, add_special_tokens=add_special_tokens)]

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        return self._theirs.decode(
            [token_id for token_id in ids if 0 <= token_id < self.vocab_size],
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def token(self, token_id: int) -> str | None:
        return self._theirs.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes | None:
        token = self.token(token_id)
        return None if token is None else self._theirs.convert_tokens_to_string([token]).encode("utf-8")


def _special_tokens(theirs: Any) -> dict[str, str]:
    found = {role: getattr(theirs, role, None) for role in _ROLES}
    return {role: str(token) for role, token in found.items() if token is not None}
