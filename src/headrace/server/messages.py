"""Chat messages as clients send them to what chat templates understand."""

from __future__ import annotations

from typing import Any, cast

from headrace.front.errors import RequestError

__all__ = ["plain_messages"]

UNBUILT_FIELDS = ("tool_calls", "tool_call_id", "function_call", "tools", "audio", "reasoning_content", "reasoning")


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents only; what a message says otherwise (a name) stays for the template.

    Raises:
        RequestError: no messages, no role, or parts that this server can't take; it names the message and the part.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    return [_plain(message, index) for index, message in enumerate(messages)]


def _plain(message: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is required and must be text", param="messages")
    for name in UNBUILT_FIELDS:
        if message.get(name):
            raise RequestError(f"{where}.{name} is not supported yet", param="messages", code="unsupported_parameter")
    if role in ("tool", "function"):
        raise RequestError(
            f"{where}: the role {role!r} is not supported yet", param="messages", code="unsupported_parameter"
        )
    kept = {key: value for key, value in message.items() if key not in UNBUILT_FIELDS and value is not None}
    # OpenAI's newer name of the system role, which no template knows.
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _content(message.get("content"), where)
    return kept


def _content(content: Any, where: str) -> str:
    if content is None:
        raise RequestError(f"{where}.content is required", param="messages")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be text or a list of parts", param="messages")
    texts: list[str] = []
    for at, given in enumerate(cast("list[Any]", content)):
        part = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "text":
            raise RequestError(f"{where}.content[{at}].text must be text", param="messages")
        else:
            raise RequestError(
                f"{where}.content[{at}]: parts of type {kind!r} can't be taken by this model, which reads text only",
                param="messages",
                code="unsupported_content",
            )
    return "\n".join(texts)
