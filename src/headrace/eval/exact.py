"""Exact match: questions of a JSON-lines file, answers compared as strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headrace.eval.port import Generation, Model

__all__ = ["DEFAULT_PROMPT", "Answered", "Asking", "Item", "measure_exact_match", "read_items"]

DEFAULT_PROMPT = "Question: {question}\nAnswer:"


@dataclass(frozen=True, slots=True)
class Item:
    """One question, and the answers that count as right."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How questions become prompts, and how an answer is read out of what came."""

    prompt: str = DEFAULT_PROMPT
    """With {question} in it."""
    num_shots: int = 0
    """Solved items in front of each question, taken from `shots`."""
    is_chat: bool = False
    """Through the chat template: shots as turns of user and assistant."""
    max_tokens: int = 64
    stop: tuple[str, ...] = ("\n",)
    extract: str = ""
    """Regular expression; the last match counts, its first group if it has one. "" takes all."""
    ignores_case: bool = False

    def __post_init__(self) -> None:
        if "{question}" not in self.prompt:
            raise ValueError(f"--prompt must have {{question}} in it, got {self.prompt!r}")
        try:
            re.compile(self.extract)
        except re.error as error:
            raise ValueError(f"--extract is no regular expression ({error}): {self.extract!r}") from None

    def read(self, text: str) -> str | None:
        """The answer in a text; None: the expression doesn't match."""
        if self.extract:
            found = list(re.finditer(self.extract, text))
            if not found:
                return None
            text = (found[-1][1] or "") if found[-1].re.groups else found[-1][0]
        return self.normalised(text)

    def normalised(self, text: str) -> str:
        """White space is one space, and none at the ends."""
        text = " ".join(text.split())
        return text.casefold() if self.ignores_case else text


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What came of one question."""

    question: str
    answers: tuple[str, ...]
    text: str
    extracted: str | None
    is_right: bool


def read_items(path: Path) -> list[Item]:
    """Lines of `{"question": TEXT, "answer": TEXT or [TEXT, ...]}`.

    Raises:
        ValueError: naming the line and the field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise ValueError(f"{path}: {reason}: give a JSON-lines file of question and answer") from None
    items = [_item(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not items:
        raise ValueError(f"{path} has no questions: give JSON lines with question and answer")
    return items


def measure_exact_match(
    model: Model, items: Sequence[Item], asking: Asking, *, shots: Sequence[Item] = ()
) -> list[Answered]:
    """Greedy answers to every question.

    Args:
        shots: where solved examples come from, in this order; a question is never its own example. None of them: the
            other items.

    Raises:
        ValueError: too few examples, or no chat template.
    """
    source = list(shots) or list(items)
    prompts = [_prompt(model, item, [each for each in source if each != item], asking) for item in items]
    wanted = Generation(max_tokens=asking.max_tokens, stop=asking.stop)
    texts = model.generate(prompts, [wanted] * len(prompts), label="exact-match")
    found: list[Answered] = []
    for item, text in zip(items, texts):
        extracted = asking.read(text)
        right = {asking.normalised(answer) for answer in item.answers}
        found.append(
            Answered(
                question=item.question,
                answers=item.answers,
                text=text,
                extracted=extracted,
                is_right=extracted is not None and extracted in right,
            )
        )
    return found


def _prompt(model: Model, item: Item, source: Sequence[Item], asking: Asking) -> list[int]:
    shots = source[: asking.num_shots]
    if len(shots) < asking.num_shots:
        raise ValueError(f"--num_shots is {asking.num_shots} and there are {len(shots)} other items: lower it")
    asked = [(asking.prompt.replace("{question}", each.question), each.answers[0]) for each in shots]
    question = asking.prompt.replace("{question}", item.question)
    if not asking.is_chat:
        return model.encode("".join(f"{prompt} {answer}\n\n" for prompt, answer in asked) + question)
    messages: list[dict[str, str]] = []
    for prompt, answer in asked:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    text = model.render([*messages, {"role": "user", "content": question}])
    return model.encode(text, add_special_tokens=False)  # the template writes BOS itself


def _item(line: str, where: str) -> Item:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error}): one object a line") from None
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    question, answer = fields.get("question"), fields.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: question must be a text, got {json.dumps(question)}")
    given = cast("list[Any]", answer) if isinstance(answer, list) else [answer]
    answers = tuple(each for each in given if isinstance(each, str))
    if not answers or len(answers) < len(given):
        raise ValueError(f"{where}: answer must be a text or a list of texts, got {json.dumps(answer)}")
    return Item(question, answers)
