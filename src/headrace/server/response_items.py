"""Items of the Responses API as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from headrace.front.errors import RequestError

__all__ = ["Item", "as_items", "chat_messages"]

Item = dict[str, Any]

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts, and the name of their text."""
ROLES = ("user", "assistant", "system", "developer")


def as_items(given: str | list[Item] | None) -> list[Item]:
    """The `input` of a request as a list."""
    if given is None or given == [] or given == "":
        raise RequestError("input is empty: give text or at least one item", param="input",
                           code="missing_required_parameter")  # fmt: skip
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def chat_messages(before: Sequence[Item], items: Sequence[Item]) -> list[dict[str, Any]]:
    """The chat of a stored conversation and what has been added to it.

    Calls, and the reasoning before them, belong to one message of the assistant, so they are joined to it.

    Raises:
        RequestError: an item that this server can't take, by its place among `items`.
    """
    chat = _Chat()
    for at, item in enumerate([*before, *items], -len(before)):
        chat.add(item, f"input[{at}]")
    chat.close()
    return chat.messages


class _Chat:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's message that is being put together."""

    def add(self, item: Item, where: str) -> None:
        kind = item.get("type", "message")
        if kind == "reasoning":
            self._begin(with_content=True)["reasoning_content"] = _reasoning(item, where)
        elif kind == "function_call":
            self._begin(with_content=False).setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "message" and item.get("role") == "assistant":
            self._begin(with_content=True)["content"] = _content(item.get("content"), where)
        elif kind == "message":
            self.close()
            self.messages.append(_message(item, where))
        elif kind == "function_call_output":
            self.close()
            call_id = _text(item, "call_id", where)
            output = _content(item.get("output"), where, name="output")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            raise RequestError(
                f"{where}: items of type {kind!r} are not supported", param="input", code="unsupported_item"
            )

    def close(self) -> None:
        if self._turn is not None:
            self._turn.setdefault("content", "")
            self.messages.append(self._turn)
            self._turn = None

    def _begin(self, *, with_content: bool) -> dict[str, Any]:
        """The turn that the item belongs to: text after text or after calls is a new one."""
        turn = self._turn
        if turn is not None and with_content and ("content" in turn or "tool_calls" in turn):
            self.close()
        if self._turn is None:
            self._turn = {"role": "assistant"}
        return self._turn


def _message(item: Item, where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param="input")
    return {"role": role, "content": _content(item.get("content"), where)}


def _content(content: Any, where: str, *, name: str = "content") -> str:
    """The text of a content in any form."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.{name} must be text or a list of parts", param="input")
    parts: list[dict[str, Any]] = []
    for at, given in enumerate(cast("list[Any]", content)):
        part = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        kind = str(part.get("type"))
        place = f"{where}.{name}[{at}]"
        if kind in TEXTS:
            parts.append({"type": "text", "text": _text(part, TEXTS[kind], place)})
        else:
            raise RequestError(f"{place}: parts of type {kind!r} can't be taken by this model, which reads text only",
                               param="input", code="unsupported_content")  # fmt: skip
    return "\n".join(part["text"] for part in parts)


def _reasoning(item: Item, where: str) -> str:
    parts: list[Any] = [*(item.get("content") or ()), *(() if item.get("content") else item.get("summary") or ())]
    return "\n".join(_text(cast("dict[str, Any]", part), "text", where) for part in parts if isinstance(part, dict))


def _call(item: Item, where: str) -> dict[str, Any]:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _text(values: dict[str, Any], name: str, where: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is required and must be text", param="input")
    return value
