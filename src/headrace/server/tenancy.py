"""Who sends a request: whose cached prefixes it may find, and what it is called."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from typing import NamedTuple

from starlette.datastructures import Headers

from headrace.front.cache import name_of

__all__ = ["REQUEST_ID_HEADER", "SESSION_HEADER", "Caller", "key_of", "salt_of"]

SESSION_HEADER = "x-session-id"


REQUEST_ID_HEADER = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
"""What may stand in headers and logs."""


class Caller(NamedTuple):
    """What a request's headers say about who sends it."""

    api_key: str = ""
    """As sent; that the server knows it was checked before."""
    session_id: str | None = None
    """The conversation, where the body names none."""
    request_id: str = ""
    """As its client calls it; "" when it doesn't, or in a way that can't be repeated."""
    arrived_s: float = 0.0
    """time.monotonic() when its headers were there."""

    @classmethod
    def of(cls, headers: Headers) -> Caller:
        name = headers.get(REQUEST_ID_HEADER, "")
        return cls(
            key_of(headers),
            headers.get(SESSION_HEADER) or None,
            name if SANE_ID.fullmatch(name) else "",
            time.monotonic(),
        )


def key_of(headers: Headers) -> str:
    """The API key as OpenAI's clients send it, or else as Anthropic's do; "" is none."""
    sent = headers.getlist("authorization")
    if not sent:
        return headers.get("x-api-key", "").strip()
    kind, _, key = sent[-1].partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


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
