"""What a format must say of itself, and what a parser of model output offers.

Text goes in as it is generated, events come out. One incremental machine tells reasoning, content and tool calls apart.
Its events, joined, don't depend on how the text was cut into pieces, and its time is linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace.server.parsers._output import Output
    from headrace.server.parsers._tape import Tape

__all__ = [
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CallTags",
    "Calls",
    "Content",
    "Event",
    "Format",
    "OutputParser",
    "Reasoning",
    "Signs",
    "Thinking",
    "Tool",
    "Tree",
]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; calls are numbered from 0 in the order of their begin."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; all of a call's pieces joined are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole. A call without an end was cut off (its output ended early)."""

    index: int


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd


class OutputParser(Protocol):
    """The state of one sequence."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as the text so far tells."""
        ...

    def push(self, text: str) -> list[Event]:
        """The events that this piece of text completes; whatever may still become a marker is held back."""
        ...

    def finish(self) -> list[Event]:
        """The output has ended: what was held back, as what it is by then. Nothing may be pushed afterwards."""
        ...


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON schema of its arguments, an object's; {} takes any."""
    strict: bool = False
    """Its calls must match the schema whenever it is called."""


Tree = dict[str, Any]
"""A node of a structural tag's format tree, as `text/grammars` takes it."""


@dataclass(frozen=True, kw_only=True)
class CallTags:
    """How calls are written, for grammars: `before`, then calls with `separator` between them, then `after`."""

    tag: Callable[[Tool], Tree]
    """The `tag` node of one call of this tool; its begin names the tool."""
    separator: str = ""
    before: str = ""
    after: str = ""
    trigger: str = ""
    """With what a call in free text begins."""


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """How a format marks reasoning."""

    begin: str
    end: str
    tokens: tuple[str, ...] = ()
    """Special tokens among the markers: the text of an output has them only if somebody asks for them."""
    is_open: bool = False
    """Without a word of the prompt on it, the output begins inside the reasoning."""
    between: str = ""
    """What the model writes between the end and what comes next."""
    also_ends: tuple[str, ...] = ()
    """Marks of other things inside of which there is no reasoning any more."""
    anywhere: bool = False
    """`begin` counts in the middle of an answer, too: ordinary text can't spell it."""


Reader = Callable[["Tape", "Output", str, Mapping[str, Tool]], Generator[None, None, None]]
"""Reads calls from behind a marker that begins them, up to where content goes on."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """How a format writes tool calls."""

    begins: tuple[str, ...]
    """Markers after which `read` takes over; () where calls have none."""
    read: Reader
    tags: CallTags
    tokens: tuple[str, ...] = ()
    """As in `Thinking`."""
    at_start: str = ""
    """Characters of which one at the start of an answer begins a call without a marker."""
    ends_reasoning: bool = False
    """A call's marker inside the reasoning ends it: ordinary text can't spell it."""
    new_id: Callable[[str, int], str] | None = None
    """Ids from name and number of a call, where the model's own spelling matters; None is a random one."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """By what a model is known to use a format."""

    template: tuple[str, ...] = ()
    """Texts that its chat template holds, all of them."""
    absent: tuple[str, ...] = ()
    """Texts that it doesn't hold, none of them."""
    model_types: tuple[str, ...] = ()
    """Prefixes of `model_type` that decide between formats whose templates look alike."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One file of this room. A name may serve `--reasoning_parser`, `--tool_parser`, or both."""

    thinking: Thinking | None = None
    calls: Calls | None = None
    whole: Callable[[Tape, Output, Mapping[str, Tool] | None, bool], Generator[None, None, None]] | None = None
    """For formats whose parts can't be told apart by markers alone: reads a whole output instead of `thinking` and
    `calls` (which then are for prompts and grammars only). Tools are None when calls aren't wanted; the flag says that
    the output begins inside the reasoning."""
    answer: tuple[str, str] = ("", "")
    """What stands around an answer, where something does."""
    reasoning_signs: Signs | None = None
    """None: never chosen by `auto`."""
    tool_signs: Signs | None = None
    source: Sequence[str] = ()
    """Where the format is published."""
