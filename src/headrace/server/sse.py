"""Server-sent events: how each form of them is framed."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["DONE", "data_event", "typed_event"]

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of chunks."""

encode = msgspec.json.encode


def data_event(body: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + encode(body) + b"\n\n"


def typed_event(body: dict[str, Any]) -> bytes:
    """An event that is named as its body's `type`."""
    return b"event: " + body["type"].encode() + b"\ndata: " + encode(body) + b"\n\n"
