"""The tokenizer port, its fake, and the checks between a tokenizer and its model."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.hub.config import text_config
from headrace.hub.errors import ModelError

__all__ = ["ByteTokenizer", "DecodeRule", "Tokenizer", "check_vocabulary", "encode_prompt"]

logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """How a tokenizer's `decode` makes text of tokens, where it can be told token by token.

    `bytes`: the tokens' bytes (`token_bytes`) joined and read as UTF-8, invalid parts as U+FFFD.
    `pieces`: the tokens' strings (`token`) joined, after these steps, in this order:
    """

    kind: Literal["bytes", "pieces"]
    replacements: tuple[tuple[str, str], ...] = ()
    """In each token, text to replace and what with."""
    drop_in_first: str = ""
    """Character that the first token loses wherever it stands in it (before `replacements`)."""
    has_byte_tokens: bool = False
    """Tokens such as `<0x0A>` are bytes; a run of them is one UTF-8 text, or one U+FFFD each if it is invalid."""
    strip_left: str = ""
    """Taken off the start of the text, at most `num_strip_left` times."""
    num_strip_left: int = 0

    def piece(self, token: str) -> str | bytes:
        """A token's text, or its byte if it is a byte token. For `pieces` only."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """What the tokenizer's own files name as end; `hub.config.eos_token_ids` adds the model's."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """By role (`bos_token`, `eos_token`, ...), for chat templates."""
        ...

    @property
    def is_fast(self) -> bool:
        """Whether encoding is native code that releases the interpreter lock."""
        ...

    @property
    def decode_rule(self) -> DecodeRule | None:
        """None: only `decode` knows."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for text that is not valid Unicode (lone surrogates)."""
        ...

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Ids without a token give no text. Spaces between special tokens are a matter of slow tokenizers only."""
        ...

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (`Ġthe`, `▁the`, `<0x0A>`), or None for an id without a token."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the token stands for, or None for an id without a token."""
        ...


class ByteTokenizer:
    """The fake: ids 0 to 255 are bytes, 256 is BOS, 257 is EOS. Text is decoded as UTF-8 with U+FFFD for errors."""

    bos_id: int | None = 256
    eos_ids = frozenset({257})
    special_ids = frozenset({256, 257})
    vocab_size = 258
    is_fast = True
    special_tokens: Mapping[str, str] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    decode_rule: DecodeRule | None = DecodeRule("bytes")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = list(encode_utf8(text))
        return [256, *ids] if add_special_tokens else ids

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.token_bytes(i) or b"" for i in kept).decode("utf-8", errors="replace")

    def token(self, token_id: int) -> str | None:
        if token_id in self.special_ids:
            return self.special_tokens["bos_token" if token_id == self.bos_id else "eos_token"]
        return f"<0x{token_id:02X}>" if 0 <= token_id < 256 else None

    def token_bytes(self, token_id: int) -> bytes | None:
        if 0 <= token_id < 256:
            return bytes([token_id])
        return (self.token(token_id) or "").encode() or None


def encode_utf8(text: str) -> bytes:
    """Raises ValueError with the remedy for text with lone surrogates, which JSON can carry."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at character {error.start}: send valid Unicode text") from None


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of a raw prompt. The tokenizer's BOS is left out if the text already begins with it (never two)."""
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    bos_id = tokenizer.bos_id
    if add_special_tokens and bos_id is not None and ids[:2] == [bos_id, bos_id]:
        return ids[1:]
    return ids


def check_vocabulary(tokenizer: Tokenizer, config: Mapping[str, Any]) -> int:
    """`num_valid_ids`: how many of the model's ids the tokenizer knows; higher ones must never be sampled.

    Embedding rows beyond the tokenizer are padding. Special tokens beyond the embedding (an image marker in a text-only
    model) are tolerated, since no text model samples them and prompts with them are refused.

    Raises:
        ModelError: the tokenizer has more ordinary tokens than the model has rows: it belongs to another model.
    """
    num_rows = text_config(config).get("vocab_size", config.get("vocab_size"))
    if not isinstance(num_rows, int):
        raise ModelError("the model's config has no vocab_size: use a folder saved by transformers")
    if tokenizer.vocab_size <= num_rows:
        return tokenizer.vocab_size
    beyond = [i for i in range(num_rows, tokenizer.vocab_size) if tokenizer.token(i) is not None]
    ordinary = [i for i in beyond if i not in tokenizer.special_ids]
    if ordinary:
        raise ModelError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1} and the model's vocabulary has {num_rows} ids:"
            " they belong to different models; give the model's own tokenizer"
        )
    names = ", ".join(str(tokenizer.token(i)) for i in beyond[:3])
    logger.warning("special tokens beyond the model's vocabulary of %d can't be used: %s", num_rows, names)
    return num_rows
