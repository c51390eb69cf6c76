"""The bodies of /v1/messages and /v1/messages/count_tokens, and the chat that they ask for."""

from __future__ import annotations

import json
from typing import Any, ClassVar, cast

from headrace.front.errors import RequestError
from headrace.server.bodies import Body, joined

__all__ = ["FROM_CHAT", "CountBody", "MessageBody", "chat_fields"]

FROM_CHAT = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Names of the chat's fields in this API, for errors."""

NOT_PASSED_ON = frozenset(
    {"stop", "max_completion_tokens", "logprobs", "top_logprobs", "echo", "detokenize", "functions", "function_call",
     "response_format", "stream_options", "parallel_tool_calls"}
)  # fmt: skip
"""Fields of the chat API that this one hasn't; without effect here."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(Body):
    """POST /v1/messages/count_tokens. Fields that are not here are those of the chat API, under the same names."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id"}
    )
    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],), "context_management": ()}

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessageBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def chat_fields(body: CountBody) -> dict[str, Any]:
    """The chat body that asks for the same.

    Raises:
        RequestError: something that only this API has and this server can't do.
    """
    passed_on = {
        name: value
        for name, value in (body.model_extra or {}).items()
        if name not in NOT_PASSED_ON and name not in body.INERT and name not in body.UNBUILT
    }
    choice = body.tool_choice or {}
    config = body.output_config or {}
    own: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "tools": [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _choice(choice) if choice else None,
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "response_format": _format(config.get("format")),
        "reasoning_effort": config.get("effort"),
        **_thinking(body.thinking),
    }
    if isinstance(body, MessageBody):
        own |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
        }
    return joined(passed_on, own, FROM_CHAT)


def _thinking(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None or given.get("type") == "adaptive":
        return {}
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in ("enabled", "disabled"):
        raise RequestError(f"thinking.type must be 'enabled', 'disabled' or 'adaptive', got {kind!r}", param="thinking")
    if kind == "enabled" and not (type(budget) is int and budget > 0):
        raise RequestError("thinking.budget_tokens is required and must be at least 1", param="thinking")
    return {"thinking": {"type": kind}, "thinking_token_budget": budget if kind == "enabled" else None}


def _format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    values = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if values.get("type") != "json_schema" or not isinstance(values.get("schema"), dict):
        raise RequestError("output_config.format must be a json_schema with its schema", param="output_config")
    schema = {"name": values.get("name", "output"), "schema": values["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            f"{where}: a tool of type {kind!r} can't be run here, only tools with a name and an input_schema",
            param="tools",
        )
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {"type": "object"}}}


def _choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}
    if kind not in CHOICES:
        raise RequestError(f"tool_choice.type must be auto, any, tool or none, got {kind!r}", param="tool_choice")
    return CHOICES[kind]


# ---- messages --------------------------------------------------------------------------------


def _messages(body: CountBody) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if body.system:
        chat.append({"role": "system", "content": _texts(body.system, "system")})
    if not body.messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    for at, message in enumerate(body.messages):
        where, role = f"messages[{at}]", message.get("role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role must be user, assistant or system, got {role!r}", param="messages")
        content = message.get("content")
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise RequestError(f"{where}.content must be text or a list of blocks", param="messages")
        elif role == "assistant":
            chat.append(_assistant(_blocks(cast("list[Any]", content)), where))
        elif role == "system":
            chat.append({"role": role, "content": _texts(cast("list[Any]", content), f"{where}.content")})
        else:
            chat += _user(_blocks(cast("list[Any]", content)), where)
    if chat[-1]["role"] == "assistant":
        raise RequestError(
            "the last message is the assistant's: going on with it is not supported, end with one of the user",
            param="messages",
        )
    return chat


def _blocks(content: list[Any]) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", block) if isinstance(block, dict) else {} for block in content]


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content[{at}]"
        if block.get("type") == "tool_result":
            content = block.get("content")
            text = "" if content is None else _texts(content, f"{place}.content")
            results.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id", place), "content": text})
        else:
            parts.append(_part(block, place))
    if not parts and results:
        return results
    content = "\n".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts
    return [*results, {"role": "user", "content": content}]


def _part(block: dict[str, Any], place: str) -> dict[str, Any]:
    kind = block.get("type")
    given = block.get("source")
    source = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if kind == "text":
        return {"type": "text", "text": _text(block, "text", place)}
    if kind == "document" and source.get("type") == "text":
        return {"type": "text", "text": _text(source, "data", f"{place}.source")}
    if kind == "image":
        raise RequestError(
            f"{place}: blocks of type 'image' can't be taken by this model, which reads text only",
            param="messages",
            code="unsupported_content",
        )
    raise RequestError(f"{place}: blocks of type {kind!r} can't be taken", param="messages")


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        place, kind = f"{where}.content[{at}]", block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", place))
        elif kind == "tool_use":
            function = {"name": _text(block, "name", place), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": _text(block, "id", place), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise RequestError(f"{place}: blocks of type {kind!r} can't be taken", param="messages")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of text blocks", param=where.split("[")[0])
    texts: list[str] = []
    for at, block in enumerate(_blocks(cast("list[Any]", content))):
        if block.get("type") != "text":
            kind = block.get("type")
            raise RequestError(f"{where}[{at}]: blocks of type {kind!r} can't be taken", param=where.split("[")[0])
        texts.append(_text(block, "text", f"{where}[{at}]"))
    return "\n".join(texts)


def _text(values: dict[str, Any], name: str, where: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is required and must be text", param=where.split("[")[0].split(".")[0])
    return value
