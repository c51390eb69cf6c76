"""Whose cached prefixes a request may find."""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from starlette.datastructures import Headers

from headrace.front.cache import name_of

__all__ = ["SESSION_HEADER", "Caller", "salt_of"]

SESSION_HEADER = "x-session-id"


class Caller(NamedTuple):
    """What a request's headers say about who sends it."""

    api_key: str = ""
    """As sent; that the server knows it was checked before."""
    session_id: str | None = None
    """The conversation, where the body names none."""

    @classmethod
    def of(cls, headers: Headers) -> Caller:
        sent = headers.getlist("authorization")
        kind, _, key = sent[-1].partition(" ") if sent else ("", "", "")
        return cls(key.strip() if kind.lower() == "bearer" else "", headers.get(SESSION_HEADER) or None)


def salt_of(caller: Caller, given: str | None, *, from_api_key: bool) -> str:
    """The cache salt of a request: the client's own, or one that only who has its API key can have.

    In the second case the client's salt is mixed in: it tells apart prompts of one key, and can't name those of
    another. The same key has the same salt after a restart.

    Raises:
        RequestError: `cache_salt` is empty or too long.
    """
    salt = name_of(given, "cache_salt")
    if not from_api_key:
        return salt
    message = b"headrace cache salt\0" + salt.encode()
    return "key-" + hmac.new(caller.api_key.encode("utf-8", "surrogateescape"), message, hashlib.sha256).hexdigest()
