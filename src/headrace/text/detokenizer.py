"""Token ids to text as they arrive.

The law: for every split of the ids, the deltas joined (with `flush`) equal `tokenizer.decode` of all ids, character for
character, and no delta holds U+FFFD unless that text does. The cost of a token doesn't grow with the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from headrace.text.tokenizer import DecodeRule, Tokenizer

__all__ = ["Detokenizer"]

_REPLACEMENT = "\ufffd"


class _Stream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one sequence. `push` ids in order, then `flush` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids`: special tokens that have text even where special tokens are left out."""
        rule = tokenizer.decode_rule
        skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._stream: _Stream
        if rule is None and shown_ids:
            self._stream = _Filtered(_WindowStream(tokenizer, False, spaces_between_special_tokens), skipped)
        elif rule is None:
            self._stream = _WindowStream(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        elif rule.kind == "bytes":
            self._stream = _ByteStream(tokenizer, skipped)
        else:
            self._stream = _PieceStream(tokenizer, rule, skipped)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; what may still change waits for later ids or `flush`."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """The rest, at the end of the sequence."""
        return self._stream.flush()


class _ByteStream:
    """Tokens are bytes of UTF-8: an unfinished character waits, an impossible one is U+FFFD at once."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._token_bytes(i) or b"" for i in ids if i not in self._skipped))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    """Tokens are strings, some of them single bytes.

    A run of byte tokens waits for its end: `decode` gives one U+FFFD for each of its bytes if the run as a whole is not
    UTF-8, so its first character isn't known before.
    """

    def __init__(self, tokenizer: Tokenizer, rule: DecodeRule, skipped: frozenset[int]) -> None:
        self._token = tokenizer.token
        self._rule = rule
        self._skipped = skipped
        self._byte_run = bytearray()
        self._drop_in_next = rule.drop_in_first
        self._num_strip_left = rule.num_strip_left

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in ids:
            token = None if token_id in self._skipped else self._token(token_id)
            if token is None:
                continue
            if self._drop_in_next:
                token = token.replace(self._drop_in_next, "")
                self._drop_in_next = ""
            piece = self._rule.piece(token)
            if isinstance(piece, bytes):
                self._byte_run += piece
                continue
            parts.append(self._end_byte_run())
            parts.append(piece)
        return self._strip("".join(parts))

    def flush(self) -> str:
        return self._strip(self._end_byte_run())

    def _end_byte_run(self) -> str:
        if not self._byte_run:
            return ""
        run = bytes(self._byte_run)
        self._byte_run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._num_strip_left and text:
            if not text.startswith(self._rule.strip_left):
                self._num_strip_left = 0
                break
            text = text[len(self._rule.strip_left) :]
            self._num_strip_left -= 1
        return text


class _Filtered:
    """Another stream without some ids."""

    def __init__(self, stream: _Stream, skipped: frozenset[int]) -> None:
        self._stream = stream
        self._skipped = skipped

    def push(self, ids: Sequence[int]) -> str:
        return self._stream.push([token_id for token_id in ids if token_id not in self._skipped])

    def flush(self) -> str:
        return self._stream.flush()


class _WindowStream:
    """For decoders that are black boxes: decodes the last tokens with and without the new ones and takes the rest.

    `flush` compares with the whole decode, so that the law holds as long as each delta was right.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spaces_between_special_tokens = spaces_between_special_tokens
        self._ids: list[int] = []
        self._context_start = 0
        self._num_shown = 0
        """Ids whose text has been given out."""
        self._next_try = 1
        """Waiting ids that make the next attempt worth while; doubles, so that a long wait costs linear time."""
        self._text: list[str] = []

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        num_waiting = len(self._ids) - self._num_shown
        if num_waiting < self._next_try:
            return ""
        context = self._decode(self._ids[self._context_start : self._num_shown])
        text = self._decode(self._ids[self._context_start :])
        if len(text) <= len(context) or text.endswith(_REPLACEMENT) or not text.startswith(context):
            self._next_try = 2 * num_waiting
            return ""
        if self._decode(self._ids[self._num_shown :]):
            self._context_start = self._num_shown
        self._num_shown = len(self._ids)
        self._next_try = 1
        self._text.append(text[len(context) :])
        return self._text[-1]

    def flush(self) -> str:
        shown = "".join(self._text)
        whole = self._decode(self._ids)
        return whole[len(shown) :] if whole.startswith(shown) else ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            ids,
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces_between_special_tokens,
        )
