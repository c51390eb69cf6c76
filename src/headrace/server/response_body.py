"""The body of POST /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict

from headrace.front.errors import RequestError
from headrace.server.bodies import Body, joined

__all__ = ["FROM_CHAT", "ResponseBody", "chat_fields"]

FROM_CHAT = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Names of the chat's fields in this API, for errors."""

NOT_PASSED_ON = frozenset(
    {"messages", "max_tokens", "max_completion_tokens", "logprobs", "echo", "detokenize", "functions", "function_call",
     "response_format"}
)  # fmt: skip
"""Fields of the chat API that this one hasn't; without effect here."""

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None
    summary: str | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseBody(Body):
    """POST /v1/responses. Fields that are not here are those of the chat API, under the same names."""

    INERT: ClassVar[frozenset[str]] = frozenset({"max_tool_calls", "access_programs", "background_options"})
    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {
        "conversation": (),
        "prompt": (),
        "moderation": (),
        "context_management": ([],),
    }

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def chat_fields(body: ResponseBody, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat body that asks for the same.

    Raises:
        RequestError: something that only this API has and this server can't do.
    """
    if body.background:
        raise RequestError(
            "background responses are not supported: leave background out and stream the response",
            param="background",
            code="unsupported_parameter",
        )
    if body.truncation not in (None, "disabled"):
        raise RequestError(
            f"truncation {body.truncation!r} is not supported: shorten the input and leave it at 'disabled'",
            param="truncation",
            code="unsupported_parameter",
        )
    if len(body.metadata or ()) > MAX_METADATA:
        raise RequestError(f"metadata has more than {MAX_METADATA} entries", param="metadata")
    passed_on = {name: value for name, value in (body.model_extra or {}).items() if name not in NOT_PASSED_ON}
    tools, choice = _tools(body.tools or []), body.tool_choice
    if isinstance(choice, dict):
        tools, choice = _choice(choice, tools)
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    own: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(text.format),
        "verbosity": None if text.verbosity == "medium" else text.verbosity,
        "reasoning_effort": reasoning.effort,
    }
    if body.wants_logprobs:
        own |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return joined(passed_on, own, FROM_CHAT)


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            raise RequestError(
                f"tools[{at}]: a tool of type {kind!r} can't be run here, only functions that the client calls",
                param="tools",
                code="unsupported_tool",
            )
        names = ("name", "description", "parameters", "strict")
        chat.append({"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}})
    return chat


def _choice(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any]:
    """The tools that are left, and the chat's `tool_choice`."""
    kind = choice.get("type")
    if kind == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = [cast("dict[str, Any]", tool).get("name") for tool in choice["tools"] if isinstance(tool, dict)]
        left = [tool for tool in tools if tool["function"].get("name") in allowed]
        return left, choice.get("mode", "auto") if left else "none"
    raise RequestError(
        f"tool_choice of type {kind!r} is not supported: choose 'auto', 'none', 'required' or a function",
        param="tool_choice",
        code="unsupported_tool",
    )


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Here a schema stands beside `type`, in the chat API one level deeper."""
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") != "json_schema":
        return given
    if given.get("schema") is None:
        raise RequestError("text.format: schema is missing", param="text.format")
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
