"""Workloads: what is asked of the engine, as ids and numbers of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from headrace.text.tokenizer import Tokenizer, encode_prompt

__all__ = ["Task", "is_json_array", "random_tasks", "read_json_lines"]

_UNBUILT = ("turns", "media_paths", "lora_request")


@dataclass(frozen=True, slots=True)
class Task:
    """One request: ids in, a number of ids out."""

    task_id: int
    prompt: Sequence[int]
    num_output: int


def random_tasks(*, num_requests: int, input_len: int, output_len: int, vocab_size: int, seed: int = 0) -> list[Task]:
    """Uniform ids, all requests of one length. The same seed gives the same ids on every machine."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (num_requests, input_len))  # [requests, tokens]
    return [Task(number, row, output_len) for number, row in enumerate(ids.tolist())]


def is_json_array(path: Path) -> bool:
    """Whether a file begins as a JSON array does, rather than with the object of a JSON line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while block := file.read(256):
            if text := block.lstrip():
                return text[0] == "["
    return False


def read_json_lines(lines: Iterable[str], *, name: str, tokenizer: Callable[[], Tokenizer]) -> list[Task]:
    """Tasks from lines as trtllm-bench's `prepare-dataset` writes them.

    Each is an object with `output_tokens`, one of `input_ids` and `prompt` (tokenised here), and perhaps `task_id`.

    Args:
        name: of the file, for errors.
        tokenizer: gives the model's tokenizer; called if a line has text.

    Raises:
        ValueError: naming the line and the field.
        NotImplementedError: a line with `turns`, `media_paths` or `lora_request`.
    """
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            tasks.append(_task(line, f"{name}:{number}", len(tasks), tokenizer))
    if not tasks:
        raise ValueError(f"{name} has no requests: give JSON lines with output_tokens and input_ids or prompt")
    return tasks


def _task(line: str, where: str, default_id: int, tokenizer: Callable[[], Tokenizer]) -> Task:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error}): one object a line") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object: one object a line")
    fields = cast("dict[str, Any]", value)
    for field in _UNBUILT:
        if fields.get(field):
            raise NotImplementedError(f"{where}: {field} is not built yet: remove it")
    num_output = _integer(fields.get("output_tokens"), f"{where}: output_tokens", lowest=1)
    task_id = _integer(fields.get("task_id", default_id), f"{where}: task_id", lowest=None)
    ids = _input_ids(fields, where)
    if ids is None:
        ids = _encoded(fields, where, tokenizer)
    if not ids:
        raise ValueError(f"{where}: the prompt is empty: give at least one token")
    return Task(task_id, ids, num_output)


def _integer(value: Any, what: str, *, lowest: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (lowest is not None and value < lowest):
        needed = "an integer" if lowest is None else f"an integer of at least {lowest}"
        raise ValueError(f"{what} must be {needed}, got {json.dumps(value)}")
    return value


def _input_ids(fields: dict[str, Any], where: str) -> list[int] | None:
    ids = fields.get("input_ids")
    if ids is None:
        return None
    if not isinstance(ids, list):
        raise ValueError(f"{where}: input_ids must be a list of integers")
    return [_integer(each, f"{where}: each of input_ids", lowest=0) for each in cast("list[Any]", ids)]


def _encoded(fields: dict[str, Any], where: str, tokenizer: Callable[[], Tokenizer]) -> list[int]:
    text = fields.get("prompt")
    if not isinstance(text, str):
        raise ValueError(f"{where}: neither input_ids nor prompt: give one of them")
    encoder = tokenizer()
    try:
        return encode_prompt(encoder, text, add_special_tokens=True)
    except ValueError as error:
        raise ValueError(f"{where}: prompt: {error}") from None
