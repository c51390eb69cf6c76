"""Responses that clients may come back to: by id, the least recently used leave first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.front.errors import RequestError

__all__ = ["ResponseStore", "StoredResponse"]


@dataclass(frozen=True)
class StoredResponse:
    """One finished response."""

    id: str
    owner: str
    """Who may see it: `owner_of` its API key."""
    body: bytes
    input_items: Sequence[dict[str, Any]]
    """Of its own request."""
    conversation: Sequence[dict[str, Any]]
    """All items up to its end, in order; instructions are no part of it."""
    num_bytes: int

    @classmethod
    def of(
        cls,
        id: str,
        owner: str,
        body: bytes,
        *,
        before: Sequence[dict[str, Any]],
        input_items: Sequence[dict[str, Any]],
        output: Sequence[dict[str, Any]],
    ) -> StoredResponse:
        conversation = [*before, *input_items, *output]
        # Conversations of one chain share their items, so this is what the longest of them holds, or more.
        num_bytes = len(body) + len(msgspec.json.encode(conversation))
        return cls(id, owner, body, input_items, conversation, num_bytes)


class ResponseStore:
    """Bounded by count and bytes. Used from several threads."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self.max_responses > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response: StoredResponse) -> None:
        """Keep it, if it is not larger than everything together may be."""
        if not self.is_on or response.num_bytes > self.max_bytes:
            return
        with self._lock:
            self._stored[response.id] = response
            self._num_bytes += response.num_bytes
            while len(self._stored) > self.max_responses or self._num_bytes > self.max_bytes:
                _, dropped = self._stored.popitem(last=False)
                self._num_bytes -= dropped.num_bytes

    def get(self, id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """Raises RequestError (404) with what may be the reason."""
        with self._lock:
            found = self._stored.get(id)
            if found is None or found.owner != owner:
                raise self._not_found(id, param)
            self._stored.move_to_end(id)
            return found

    def delete(self, id: str, owner: str) -> None:
        """Raises RequestError (404)."""
        with self._lock:
            found = self._stored.get(id)
            if found is None or found.owner != owner:
                raise self._not_found(id, None)
            del self._stored[id]
            self._num_bytes -= found.num_bytes

    def _not_found(self, id: str, param: str | None) -> RequestError:
        shown = id if len(id) <= 80 else id[:77] + "..."
        reason = (
            f"it was never made or not stored, was deleted, or has given way to newer ones (this server keeps the last"
            f" {self.max_responses} and at most {self.max_bytes >> 20} MiB); send the whole conversation as input"
            if self.is_on
            else "this server stores no responses; send the whole conversation as input"
        )
        code = "previous_response_not_found" if param else "response_not_found"
        return RequestError(f"there is no response {shown!r}: {reason}", param=param, code=code, status=404)
