"""What a chat says about reasoning, as variables that chat templates know."""

from __future__ import annotations

from typing import Any

from headrace.front.errors import RequestError
from headrace.server.bodies import ChatBody, PinBody

__all__ = ["variables_of"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates look for it."""


def variables_of(body: ChatBody | PinBody) -> dict[str, Any]:
    """The template's variables; those of `chat_template_kwargs` win. Raises RequestError."""
    given = body.chat_template_kwargs or {}
    if "chat_template" in given:
        raise RequestError(
            "chat_template_kwargs may not have a chat_template: a server that takes templates takes it as a field of"
            " its own",
            param="chat_template_kwargs",
        )
    variables: dict[str, Any] = {}
    if isinstance(body, ChatBody):
        effort, switch = _effort(body.reasoning_effort, "reasoning_effort"), None
        if body.thinking is not None:
            effort = _effort(body.thinking.effort, "thinking.effort") or effort
            switch = None if body.thinking.type is None else body.thinking.type == "enabled"
        if effort == "none":
            switch = False
        elif effort:
            variables["reasoning_effort"] = effort
        if switch is not None:
            variables |= dict.fromkeys(_SWITCHES, switch)
    return {**variables, **given}


def _effort(value: str | None, name: str) -> str | None:
    if value is not None and value not in EFFORTS:
        raise RequestError(f"{name} must be one of {', '.join(EFFORTS)}, got {value!r:.60}", param=name.split(".")[0])
    return value
