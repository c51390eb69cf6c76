"""A model whose log-probabilities follow from its tokens, and whose answers are scripted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.eval.port import Generation, Scored, Span
from headrace.text.tokenizer import ByteTokenizer


def logprob_of(before: Sequence[int], token: int) -> float:
    return -((sum(before) * 31 + token * 7 + len(before)) % 50 + 1) / 10


class FakeModel:
    max_len = 64
    bos_id: int | None = 256
    eos_id: int | None = 257
    name = "fake"
    chat_template = "{{ messages }}"

    def __init__(self, answer: Callable[[str], str] = str.upper) -> None:
        self.prompts: list[str] = []
        self.wanted: list[Generation] = []
        self._answer = answer
        self._tokenizer = ByteTokenizer()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return (
            "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>" * add_generation_prompt
        )

    def score(self, spans: Sequence[Span], *, label: str) -> list[list[Scored]]:
        return [
            [
                Scored(value := logprob_of(span.ids[:at], span.ids[at]), value > -2)
                for at in range(span.start, len(span.ids))
            ]
            for span in spans
        ]

    def generate(self, prompts: Sequence[Sequence[int]], wanted: Sequence[Generation], *, label: str) -> list[str]:
        texts = [self.decode(ids) for ids in prompts]
        self.prompts += texts
        self.wanted += wanted
        return [self._answer(text) for text in texts]
