"""The contract of every format in `server/parsers`: what its machine makes of an output, however the output comes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace import plugins
from headrace.server.parsers._machine import Machine
from headrace.server.parsers.port import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Format,
    Reasoning,
    Tool,
)

__all__ = ["TOOLS", "Call", "Parsed", "check_cuts", "check_noise", "check_prefixes", "load", "machine", "parse", "play"]

TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "get_weather",
            {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "options": {
                        "type": "object",
                        "properties": {"units": {"type": "string"}, "deep": {"type": "object"}},
                    },
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "exact": {"type": "boolean"},
                },
                "required": ["city"],
            },
        ),
        Tool("now", {"type": "object", "properties": {}}),
    )
}


@dataclass
class Call:
    name: str
    arguments: Any
    """Parsed, where they are JSON; else their text."""
    is_whole: bool = True


@dataclass
class Parsed:
    """All events of an output together."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list[Call])


def load(name: str) -> Format:
    return plugins.load("server.parsers", name)


def machine(name: str, *, is_open: bool = False, tools: dict[str, Tool] | None = None) -> Machine:
    format = load(name)
    return Machine(
        thinking=format if format.thinking else None,
        calls=format if format.calls else None,
        tools=TOOLS if tools is None else tools,
        is_open=is_open,
    )


def play(parser: Machine, pieces: Iterable[str]) -> list[Event]:
    """The events of an output that comes in these pieces."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return events + parser.finish()


def parse(events: Sequence[Event]) -> Parsed:
    """Joined; checks that calls are told in order: begin, arguments, end."""
    parsed = Parsed()
    texts: list[list[str]] = []
    for event in events:
        if isinstance(event, Reasoning):
            assert event.text
            parsed.reasoning += event.text
        elif isinstance(event, Content):
            assert event.text
            parsed.content += event.text
        elif isinstance(event, CallBegin):
            assert event.index == len(parsed.calls) and event.name and event.id
            parsed.calls.append(Call(event.name, None, is_whole=False))
            texts.append([])
        elif isinstance(event, CallArguments):
            assert event.index == len(parsed.calls) - 1 and not parsed.calls[-1].is_whole and event.text
            texts[-1].append(event.text)
        else:
            assert isinstance(event, CallEnd) and event.index == len(parsed.calls) - 1
            assert not parsed.calls[-1].is_whole
            parsed.calls[-1].is_whole = True
    for call, pieces in zip(parsed.calls, texts):
        text = "".join(pieces)
        try:
            call.arguments = json.loads(text)
        except ValueError:
            call.arguments = text
    return parsed


def cut(text: str, rng: random.Random, most: int) -> list[str]:
    """The text in up to `most` pieces, cut anywhere."""
    at = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(most)))
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)])]


def check_cuts(name: str, text: str, *, is_open: bool, num_cuts: int, seed: int = 0) -> None:
    """The whole text at once, a character at a time, and in random pieces are the same."""
    wanted = parse(play(machine(name, is_open=is_open), [text]))
    assert parse(play(machine(name, is_open=is_open), text)) == wanted
    rng = random.Random(seed)
    for _ in range(num_cuts):
        pieces = cut(text, rng, 12)
        assert parse(play(machine(name, is_open=is_open), pieces)) == wanted, pieces


def check_prefixes(name: str, text: str, *, is_open: bool) -> None:
    """However early an output ends: nothing raises, and what has been told is the beginning of the whole."""
    whole = parse(play(machine(name, is_open=is_open), [text]))
    for end in range(len(text)):
        parsed = parse(play(machine(name, is_open=is_open), [text[:end]]))
        assert whole.reasoning.startswith(parsed.reasoning.rstrip()) or parsed.reasoning.startswith(whole.reasoning)
        for call, full in zip(parsed.calls, whole.calls):
            assert call.name == full.name
            if call.is_whole:
                assert call.arguments == full.arguments


def check_noise(name: str, pieces: Sequence[str], *, num_texts: int, seed: int = 0) -> None:
    """Random text of markers and payload: nothing raises, cuts change nothing, and no payload is lost or doubled."""
    rng = random.Random(seed)
    for _ in range(num_texts):
        number = 10_000
        parts: list[str] = []
        for _ in range(rng.randrange(1, 24)):
            if rng.random() < 0.4:
                number += 1
                parts.append(f"<{number}>"[rng.randrange(2) : rng.choice([6, 7])])
            else:
                parts.append(rng.choice(pieces))
        text = "".join(parts)
        is_open = rng.random() < 0.3
        events = play(machine(name, is_open=is_open), [text])
        assert parse(play(machine(name, is_open=is_open), cut(text, rng, 6))) == parse(events), text
        told = " ".join(
            event.name if isinstance(event, CallBegin) else "" if isinstance(event, CallEnd) else event.text
            for event in events
        )
        ids = " ".join(
            event.id for event in events if isinstance(event, CallBegin) and not event.id.startswith("call_")
        )
        for payload in re.findall(r"1\d{4}", text):
            assert payload in told.replace(" ", "") or payload in told or payload in ids, (payload, text, events)
