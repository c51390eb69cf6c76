"""Chat messages as clients send them to what chat templates understand."""

from __future__ import annotations

import json
from typing import Any, cast

from headrace.front.errors import RequestError

__all__ = ["check_roles", "has_calls", "plain_messages"]

UNBUILT_FIELDS = ("function_call", "tools", "audio")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REASONING = ("reasoning_content", "reasoning")


def plain_messages(messages: list[dict[str, Any]], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Messages with text contents only; what a message says otherwise (a name) stays for the template.

    Arguments of past calls become objects, unless the template wants them `arguments_as_text`. A tool's result gets the
    name of the function that it is of.

    Raises:
        RequestError: no messages, no role, or parts that this server can't take; it names the message and the part.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    """Of functions, by the ids of their calls."""
    for index, message in enumerate(messages):
        kept = _plain(message, f"messages[{index}]", arguments_as_text)
        for call in kept.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if kept["role"] == "tool" and "name" not in kept and kept.get("tool_call_id") in names:
            kept["name"] = names[kept["tool_call_id"]]
        plain.append(kept)
    return plain


def check_roles(messages: list[dict[str, Any]], template: str) -> None:
    """Refuses a misspelt role, which many templates would write as it is; `template` may name roles of its own."""
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES and role not in template:
            raise RequestError(
                f"messages[{index}].role is {role!r}, which the chat template doesn't know: "
                f"use one of {', '.join(sorted(_ROLES))}",
                param="messages",
            )


def has_calls(messages: list[dict[str, Any]]) -> bool:
    """Whether a template has calls to write."""
    return any(message.get("tool_calls") for message in messages)


def _plain(message: dict[str, Any], where: str, arguments_as_text: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is required and must be text", param="messages")
    for name in UNBUILT_FIELDS:
        if message.get(name):
            raise RequestError(f"{where}.{name} is not supported yet", param="messages", code="unsupported_parameter")
    if role == "function":
        raise RequestError(
            f"{where}: the role 'function' is not supported: use 'tool' with a tool_call_id",
            param="messages",
            code="unsupported_parameter",
        )
    kept = {key: value for key, value in message.items() if key not in UNBUILT_FIELDS and value is not None}
    # OpenAI's newer name of the system role, which no template knows.
    kept["role"] = "system" if role == "developer" else role
    for name in ("tool_call_id", *_REASONING):
        if not isinstance(kept.get(name, ""), str):
            raise RequestError(f"{where}.{name} must be text", param="messages")
    calls = kept.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise RequestError(f"{where}.tool_calls: only an assistant's message has some", param="messages")
        kept["tool_calls"] = _calls(calls, f"{where}.tool_calls", arguments_as_text)
    content = message.get("content")
    # An answer may be nothing but calls, or be cut off while it reasons.
    may_be_empty = role == "assistant" and ("tool_calls" in kept or any(kept.get(name) for name in _REASONING))
    kept["content"] = "" if content is None and may_be_empty else _content(content, where)
    return kept


def _calls(calls: Any, where: str, arguments_as_text: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param="messages")
    return [_call(call, f"{where}[{at}]", arguments_as_text) for at, call in enumerate(cast("list[Any]", calls))]


def _call(call: Any, where: str, arguments_as_text: bool) -> dict[str, Any]:
    said = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    function = said.get("function")
    if said.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestError(f"{where} must have the type 'function' and a function", param="messages")
    name = cast("dict[str, Any]", function).get("name")
    arguments = cast("dict[str, Any]", function).get("arguments", "{}")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name is required and must be text", param="messages")
    if not isinstance(said.get("id", ""), str):
        raise RequestError(f"{where}.id must be text", param="messages")
    if isinstance(arguments, str) and not arguments_as_text:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False) if arguments_as_text else arguments
    return {"id": said.get("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """An object; the text as it is where the model has written none."""
    try:
        value: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return cast("dict[str, Any]", value) if isinstance(value, dict) else arguments


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
