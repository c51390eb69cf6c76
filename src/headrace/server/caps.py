"""Limits on the reasoning for who has no server: `LLM`."""

from __future__ import annotations

from headrace.front.desk import LimitReasoning
from headrace.front.text_side import TextSide
from headrace.server.parsing import choose_parsing
from headrace.server.thinking import Budget
from headrace.types import ThinkingCap
from headrace.wire import ModelInfo

__all__ = ["limits_of"]


def limits_of(reasoning_parser: str | None, info: ModelInfo, text: TextSide) -> LimitReasoning | None:
    """What a budget means for a prompt, as in /v1/completions; None: nobody knows how the model marks its reasoning.

    Raises:
        ValueError: there is no parser of that name.
    """
    tokenizer = text.tokenizer
    parsing = choose_parsing(
        reasoning_parser, None, template=text.template, tokenizer=tokenizer, model_type=info.model_type
    )
    if parsing.thinking is None or tokenizer is None:
        return None

    def limit(num_tokens: int, prompt: list[int]) -> ThinkingCap:
        known = [i for i in prompt if 0 <= i < info.num_valid_ids]  # others are refused later
        shown = tokenizer.decode(known, skip_special_tokens=False)
        return parsing.cap(Budget(num_tokens, True), shown, None, variables={})

    return limit
