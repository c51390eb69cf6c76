"""What an evaluation asks of a model; `cli/eval_model.py` has it of an `LLM`, tests have fakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["Generation", "Model", "Scored", "Span"]


class Span(NamedTuple):
    """Tokens to score: those from `start` on, each given all before it. `start` is at least 1."""

    ids: Sequence[int]
    start: int


class Scored(NamedTuple):
    """One token: its log-probability in nats, and whether no other token was likelier."""

    logprob: float
    is_top: bool


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How an answer is generated."""

    max_tokens: int
    stop: Sequence[str] = ()
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class Model(Protocol):
    """An engine with its tokenizer."""

    @property
    def max_len(self) -> int:
        """Most tokens of a span."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def name(self) -> str: ...

    @property
    def chat_template(self) -> str:
        """Its text; "" without one."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are in the text."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises ValueError: no chat template, or it refuses the messages."""
        ...

    def score(self, spans: Sequence[Span], *, label: str) -> list[list[Scored]]:
        """By span, its tokens from `start` on. `label` is for the progress bar."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], wanted: Sequence[Generation], *, label: str) -> list[str]:
        """The text of each prompt's answer, without its stop text."""
        ...
