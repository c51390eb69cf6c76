"""Which requests a measurement is made of: random ids, ShareGPT's turns, or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.sharegpt import fetch_sharegpt, sharegpt_tasks
from headrace.bench.workload import Task, is_json_array, random_tasks, read_json_lines, whole_conversations
from headrace.text.tokenizer import Tokenizer

__all__ = ["DEFAULT_NUM_REQUESTS", "Dataset", "load_tasks"]

DEFAULT_NUM_REQUESTS = 32
"""Of a dataset that has no size of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A dataset and how much of it."""

    name: str
    """`random`, `sharegpt`, a file, or `-` for standard input."""
    num_requests: int = 0
    """0 is all of a file, or DEFAULT_NUM_REQUESTS of what is made or drawn."""
    input_len: int = 128
    """Prompt tokens of random requests."""
    output_len: int = 128
    """New tokens, where the dataset doesn't say."""
    min_input_len: int = 16
    max_input_len: int = 512
    """Prompt tokens of conversations."""
    seed: int = 0

    @property
    def is_file(self) -> bool:
        return self.name not in ("random", "sharegpt")


def load_tasks(dataset: Dataset, *, vocab_size: Callable[[], int], tokenizer: Callable[[], Tokenizer]) -> list[Task]:
    """The requests, the same ones each time.

    Args:
        vocab_size: of the model; asked for random ids only.
        tokenizer: of the model; asked where prompts are text only.

    Raises:
        ValueError: the dataset can't be had or read, or is too small; one line with the remedy.
    """
    count = dataset.num_requests or DEFAULT_NUM_REQUESTS
    if dataset.name == "random":
        return random_tasks(
            num_requests=count,
            input_len=dataset.input_len,
            output_len=dataset.output_len,
            vocab_size=vocab_size(),
            seed=dataset.seed,
        )
    if dataset.name == "-":
        return _first(read_json_lines(sys.stdin, name="-", tokenizer=tokenizer), dataset)
    path = Path(dataset.name) if dataset.is_file else fetch_sharegpt()
    if not path.is_file():
        raise ValueError(f"no dataset at {dataset.name!r}: give random, sharegpt or a file")
    if not is_json_array(path):
        with path.open(encoding="utf-8", errors="replace") as file:
            return _first(read_json_lines(file, name=str(path), tokenizer=tokenizer), dataset)
    return sharegpt_tasks(
        path,
        tokenizer(),
        num_requests=count,
        output_len=dataset.output_len,
        min_input_len=dataset.min_input_len,
        max_input_len=dataset.max_input_len,
        seed=dataset.seed,
    )


def _first(tasks: list[Task], dataset: Dataset) -> list[Task]:
    wanted = dataset.num_requests
    if wanted > len(tasks):
        raise ValueError(f"{dataset.name} has {len(tasks)} requests and --num_requests is {wanted}: lower it")
    return whole_conversations(tasks, wanted) if wanted else tasks
