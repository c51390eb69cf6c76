"""Datasets for `--dataset`, made or converted: JSON lines of the reference's schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from headrace.bench.sharegpt import array_items, conversations_of
from headrace.text.tokenizer import Tokenizer

__all__ = ["conversation_rows", "fixed_rows", "mooncake_rows", "multi_turn_rows", "normal_rows", "uniform_rows",
           "write_rows"]  # fmt: skip

MOONCAKE_BLOCK = 512
"""Tokens that one of the trace's `hash_ids` stands for."""

Row = dict[str, Any]


def write_rows(rows: Iterable[Row], path: Path) -> int:
    """Write a line for each row; how many there were."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def fixed_rows(
    *, num_requests: int, input_len: int, output_len: int, shared_len: int = 0, vocab_size: int, seed: int
) -> Iterator[Row]:
    """All of one length; the first `shared_len` tokens of every prompt are the same.

    Raises:
        ValueError: nothing would be left of a prompt.
    """
    if shared_len >= input_len:
        raise ValueError(
            f"--shared_len is {shared_len} and --input_len {input_len}: leave each prompt a token of its own"
        )
    rng = np.random.default_rng(seed)
    shared = _ids(rng, shared_len, vocab_size)
    for number in range(num_requests):
        yield _row(number, shared + _ids(rng, input_len - shared_len, vocab_size), output_len)


def normal_rows(
    *,
    num_requests: int,
    input_mean: float,
    input_stdev: float,
    output_mean: float,
    output_stdev: float,
    vocab_size: int,
    seed: int,
) -> Iterator[Row]:
    """Lengths of two normal distributions, rounded, at least 1."""
    rng = np.random.default_rng(seed)
    inputs = _normal(rng, input_mean, input_stdev, num_requests)
    outputs = _normal(rng, output_mean, output_stdev, num_requests)
    for number, (num_input, num_output) in enumerate(zip(inputs, outputs)):
        yield _row(number, _ids(rng, num_input, vocab_size), num_output)


def uniform_rows(
    *,
    num_requests: int,
    input_min: int,
    input_max: int,
    output_min: int,
    output_max: int,
    vocab_size: int,
    seed: int,
) -> Iterator[Row]:
    """Lengths of two uniform distributions, both ends included.

    Raises:
        ValueError: an end lies before its beginning.
    """
    for name, low, high in (("input", input_min, input_max), ("output", output_min, output_max)):
        if low > high:
            raise ValueError(f"--{name}_min is {low} and --{name}_max {high}: the lower one comes first")
    rng = np.random.default_rng(seed)
    inputs = rng.integers(input_min, input_max, num_requests, endpoint=True).tolist()
    outputs = rng.integers(output_min, output_max, num_requests, endpoint=True).tolist()
    for number, (num_input, num_output) in enumerate(zip(inputs, outputs)):
        yield _row(number, _ids(rng, num_input, vocab_size), num_output)


def multi_turn_rows(
    *,
    num_conversations: int,
    num_turns: int,
    system_len: int,
    turn_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
) -> Iterator[Row]:
    """Conversations of random ids: a first turn behind `system_len` tokens that all share, then further turns."""
    rng = np.random.default_rng(seed)
    system = _ids(rng, system_len, vocab_size)
    for number in range(num_conversations):
        turns = [_ids(rng, turn_len, vocab_size) for _ in range(num_turns)]
        turns[0] = system + turns[0]
        yield {"task_id": number, "turns": turns, "output_tokens": output_len}


def conversation_rows(
    path: Path,
    tokenizer: Tokenizer,
    *,
    num_requests: int,
    max_turns: int,
    min_input_len: int,
    max_input_len: int,
    output_len: int | None,
    seed: int,
) -> Iterator[Row]:
    """ShareGPT's conversations in an order drawn by `seed`: the first human turn, or up to `max_turns` of them.

    Each is `prompt` or `turns` (texts) with `output_tokens`: `output_len`, or the length of the answer that stands
    behind the (last) turn in the file.

    Raises:
        ValueError: the file is no array of conversations, or has too few of these lengths.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        found = list(conversations_of(array_items(file, name=str(path))))
    random.Random(seed).shuffle(found)
    count = 0
    for talk in found:
        turns = [human for human, _ in talk[:max_turns]]
        answer = talk[len(turns) - 1][1]
        num_output = output_len or len(_encode(tokenizer, answer))
        if num_output and min_input_len <= sum(len(_encode(tokenizer, turn)) for turn in turns) <= max_input_len:
            texts: Row = {"prompt": turns[0]} if max_turns == 1 else {"turns": turns}
            yield {"task_id": count, **texts, "output_tokens": num_output}
            count += 1
            if count == num_requests:
                return
    raise ValueError(
        f"{path} has {count} conversations of {min_input_len} to {max_input_len} tokens and {num_requests} are wanted:"
        " lower --num_requests or widen --min_input_len and --max_input_len"
    )


def mooncake_rows(file: TextIO, *, name: str, num_requests: int, vocab_size: int, seed: int) -> Iterator[Row]:
    """A published trace of the Mooncake form: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    Prompts that share a `hash_ids` entry share the 512 tokens that it stands for; without them every prompt is its own.

    Raises:
        ValueError: naming the line and the field.
    """
    rng = np.random.default_rng(seed)
    for number, line in enumerate(filter(str.strip, file)):
        if num_requests and number == num_requests:
            return
        where = f"{name}:{number + 1}"
        try:
            fields = cast("dict[str, Any]", json.loads(line))
            num_input, num_output = int(fields["input_length"]), int(fields["output_length"])
            timestamp, hashes = float(fields["timestamp"]), cast("list[int]", fields.get("hash_ids") or [])
        except KeyError as error:
            raise ValueError(f"{where}: no {error.args[0]}: give timestamp, input_length and output_length") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}: one object a line, with numbers") from None
        ids: list[int] = []
        for each in hashes[: -(-num_input // MOONCAKE_BLOCK)]:
            ids += _ids(np.random.default_rng([seed, each]), MOONCAKE_BLOCK, vocab_size)
        ids = ids[:num_input] + _ids(rng, max(num_input - len(ids), 0), vocab_size)
        yield {**_row(number, ids, max(num_output, 1)), "timestamp": timestamp}


def _row(number: int, ids: Sequence[int], num_output: int) -> Row:
    return {"task_id": number, "input_ids": list(ids), "output_tokens": num_output}


def _ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    return rng.integers(0, vocab_size, count).tolist()


def _normal(rng: np.random.Generator, mean: float, stdev: float, count: int) -> list[int]:
    return np.maximum(np.rint(rng.normal(mean, stdev, count)), 1).astype(int).tolist()


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except ValueError:  # a lone surrogate
        return []
