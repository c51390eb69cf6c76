"""What a parser has told, as OpenAI's chat messages have it: whole, and in deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.server.parsers.port import CallArguments, CallBegin, Content, Event, Reasoning

__all__ = ["deltas", "has_calls", "parsed_message"]


def has_calls(events: Sequence[Event]) -> bool:
    return any(isinstance(event, CallBegin) for event in events)


def parsed_message(events: Sequence[Event]) -> dict[str, Any]:
    """The assistant's message. Reasoning has both of its usual names; nothing at all is null."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, CallBegin] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, CallBegin):
            calls[event.index] = event
            arguments[event.index] = []
        elif isinstance(event, CallArguments):
            arguments[event.index].append(event.text)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content), "refusal": None}
    if not content and (reasoning or calls):
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(arguments[index])},
            }
            for index, call in calls.items()
        ]
    return message


def deltas(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """One for each event that has something to say: a call's id and name first, then pieces of its arguments."""
    for event in events:
        if isinstance(event, Content):
            yield {"content": event.text}
        elif isinstance(event, Reasoning):
            yield {"reasoning_content": event.text, "reasoning": event.text}
        elif isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            yield {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        elif isinstance(event, CallArguments):
            yield {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
