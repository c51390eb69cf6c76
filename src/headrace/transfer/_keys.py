"""Names of blocks that are the same in every process: a chain of digests from the namespace on."""

from __future__ import annotations

import hashlib
from struct import pack

from headrace.transfer.port import StoredRequest


def next_key(parent: bytes, request: StoredRequest, at: int, *, tokens_per_block: int) -> bytes:
    """The key of block `at`, 32 bytes; `parent` is the key of the block before it, or the namespace."""
    start, end = at * tokens_per_block, (at + 1) * tokens_per_block
    digest = hashlib.sha256(parent)
    digest.update(pack(f"<{tokens_per_block}i", *request.tokens[start:end]))
    for span in request.media:
        if span.start < end and span.start + span.length > start:
            digest.update(pack("<qqI", span.start - start, span.length, len(span.digest)) + span.digest)
    return digest.digest()


class Chain:
    """The keys of one request's whole blocks, each made once."""

    def __init__(self, request: StoredRequest, tokens_per_block: int) -> None:
        self._request = request
        self._size = tokens_per_block
        self._keys = [request.namespace]

    def key(self, at: int) -> bytes:
        keys = self._keys
        while len(keys) <= at + 1:
            keys.append(next_key(keys[-1], self._request, len(keys) - 1, tokens_per_block=self._size))
        return keys[at + 1]
