"""Workloads: what is asked of the engine, as ids and numbers of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from headrace.text.tokenizer import Tokenizer, encode_prompt
from headrace.types import Request, Sampling

__all__ = ["Task", "full_lengths", "is_json_array", "random_tasks", "read_json_lines", "whole_conversations"]

_UNBUILT = ("media_paths", "lora_request")
MS = 1000
GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Task:
    """One request: ids in, a number of ids out."""

    task_id: int
    prompt: Sequence[int]
    num_output: int
    after: int | None = None
    """Index of the turn before in the same list: this prompt stands behind that one's prompt and answer."""
    at_s: float | None = None
    """When a trace has it arrive, from the trace's own zero."""

    def request(
        self, request_id: int, *, arrival_s: float, cache_salt: str, stop_ids: tuple[int, ...] = (), label: str = ""
    ) -> Request:
        """Greedy, to its whole length unless one of `stop_ids` comes. A prompt that is a list is not copied."""
        return Request(
            id=request_id,
            prompt=self.prompt if isinstance(self.prompt, list) else list(self.prompt),
            sampling=GREEDY,
            max_tokens=self.num_output,
            stop_ids=stop_ids,
            arrival_s=arrival_s,
            cache_salt=cache_salt,
            label=label,
        )


def full_lengths(tasks: Sequence[Task]) -> list[int]:
    """Prompt tokens of each task, with what the turns before it bring."""
    lengths: list[int] = []
    for task in tasks:
        assert task.after is None or task.after < len(lengths), "a turn stands behind the one before it"
        before = 0 if task.after is None else lengths[task.after] + tasks[task.after].num_output
        lengths.append(before + len(task.prompt))
    return lengths


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

    Each is an object with `output_tokens`, one of `input_ids`, `prompt` (tokenised here) and `turns` (a conversation:
    texts, or lists of ids, each answered with `output_tokens`), and perhaps `task_id` and `timestamp` (milliseconds).

    Args:
        name: of the file, for errors.
        tokenizer: gives the model's tokenizer; called if a line has text.

    Raises:
        ValueError: naming the line and the field.
        NotImplementedError: a line with `media_paths` or `lora_request`.
    """
    tasks: list[Task] = []
    num_lines = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            tasks += _tasks(line, f"{name}:{number}", tokenizer, default_id=num_lines, first=len(tasks))
            num_lines += 1
    if not tasks:
        raise ValueError(f"{name} has no requests: give JSON lines with output_tokens and input_ids, prompt or turns")
    return tasks


def whole_conversations(tasks: Sequence[Task], num_requests: int) -> list[Task]:
    """The first conversations (and single requests), as many as fit into `num_requests`; at least one."""
    end = num_requests
    while 0 < end < len(tasks) and tasks[end].after is not None:
        end -= 1
    if not end:
        end = next((at for at in range(1, len(tasks)) if tasks[at].after is None), len(tasks))
    return list(tasks[:end])


def _tasks(line: str, where: str, tokenizer: Callable[[], Tokenizer], *, default_id: int, first: int) -> Iterator[Task]:
    """Of one line; `first` is the index that its first task will have."""
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
    at_s = _timestamp_s(fields.get("timestamp"), where)
    if fields.get("turns"):
        prompts = _turns(fields["turns"], where, tokenizer)
    else:
        ids = _input_ids(fields.get("input_ids"), f"{where}: input_ids")
        prompts = [_encoded(fields.get("prompt"), where, tokenizer) if ids is None else ids]
    for number, ids in enumerate(prompts):
        if not ids:
            raise ValueError(f"{where}: the prompt is empty: give at least one token")
        after = first + number - 1 if number else None
        yield Task(task_id, ids, num_output, after=after, at_s=None if number else at_s)


def _timestamp_s(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{where}: timestamp must be milliseconds from 0, got {json.dumps(value)}")
    return value / MS


def _turns(turns: Any, where: str, tokenizer: Callable[[], Tokenizer]) -> list[list[int]]:
    if not isinstance(turns, list):
        raise ValueError(f"{where}: turns must be a list of texts")
    found: list[list[int]] = []
    for number, turn in enumerate(cast("list[Any]", turns)):
        ids = _input_ids(turn, f"{where}: turns[{number}]") if isinstance(turn, list) else None
        found.append(_encoded(turn, where, tokenizer, is_first=not number) if ids is None else ids)
    return found


def _integer(value: Any, what: str, *, lowest: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (lowest is not None and value < lowest):
        needed = "an integer" if lowest is None else f"an integer of at least {lowest}"
        raise ValueError(f"{what} must be {needed}, got {json.dumps(value)}")
    return value


def _input_ids(ids: Any, what: str) -> list[int] | None:
    if ids is None:
        return None
    if not isinstance(ids, list):
        raise ValueError(f"{what} must be a list of integers")
    return [_integer(each, f"{what.replace(': ', ': each of ', 1)}", lowest=0) for each in cast("list[Any]", ids)]


def _encoded(text: Any, where: str, tokenizer: Callable[[], Tokenizer], *, is_first: bool = True) -> list[int]:
    """Later turns of a conversation get no BOS."""
    if text is None:
        raise ValueError(f"{where}: neither input_ids nor prompt nor turns: give one of them")
    if not isinstance(text, str):
        raise ValueError(f"{where}: prompt and turns must be texts, got {json.dumps(text)[:80]}")
    encoder = tokenizer()
    try:
        return encode_prompt(encoder, text, add_special_tokens=is_first)
    except ValueError as error:
        raise ValueError(f"{where}: prompt: {error}") from None
