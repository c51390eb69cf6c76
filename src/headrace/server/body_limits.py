"""What a body may hold, told before it becomes Python's values, which take twenty times its bytes.

Text is free: a prompt is refused by its length in tokens. Bounded are the values that a body is made of.
"""

from __future__ import annotations

from typing import Any, cast

from headrace.front.errors import RequestError

__all__ = ["fail_at_first", "require_moderate"]

SMALL_BYTES = 1 << 20
"""Up to it there can't be too many."""
MAX_ELEMENTS = 1 << 22
"""As many token ids as several hundred long prompts have. Commas in texts count too, which are far fewer."""
MAX_STRINGS = MAX_CONTAINERS = 1 << 18


def require_moderate(data: bytes) -> None:
    """Raises RequestError: more values than any request needs."""
    if len(data) <= SMALL_BYTES:
        return
    counts = {
        "values": (data.count(b","), MAX_ELEMENTS),
        "strings": ((data.count(b'"') - data.count(b'\\"')) // 2, MAX_STRINGS),
        "lists": (data.count(b"["), MAX_CONTAINERS),
        "objects": (data.count(b"{"), MAX_CONTAINERS),
    }
    for name, (count, most) in counts.items():
        if count > most:
            raise RequestError(
                f"the body has more than {most} {name}: split it over several requests",
                code="body_too_large",
                status=413,
            )


def fail_at_first(schema: Any) -> Any:
    """A pydantic schema whose lists stop at their first bad item: one error is told, a million would be gathered."""
    if isinstance(schema, dict):
        known = cast("dict[str, Any]", schema)
        changed = {name: fail_at_first(value) for name, value in known.items()}
        return {**changed, "fail_fast": True} if known.get("type") == "list" else changed
    return [fail_at_first(item) for item in cast("list[Any]", schema)] if isinstance(schema, list) else schema
