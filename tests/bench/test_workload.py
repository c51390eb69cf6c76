from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.dataset import DEFAULT_NUM_REQUESTS, Dataset, load_tasks
from headrace.bench.workload import Task, random_tasks, read_json_lines
from headrace.text.tokenizer import ByteTokenizer, Tokenizer

VOCAB = 258


def no_tokenizer() -> Tokenizer:
    raise ValueError("this model has no tokenizer")


def read(*lines: Any) -> list[Task]:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return read_json_lines(text, name="set.jsonl", tokenizer=ByteTokenizer)


def load(dataset: Dataset) -> list[Task]:
    return load_tasks(dataset, vocab_size=lambda: VOCAB, tokenizer=ByteTokenizer)


def test_random_requests_have_the_lengths_asked_for_and_follow_the_seed() -> None:
    tasks = random_tasks(num_requests=5, input_len=7, output_len=3, vocab_size=11, seed=4)
    assert [(len(task.prompt), task.num_output) for task in tasks] == [(7, 3)] * 5
    assert {token for task in tasks for token in task.prompt} <= set(range(11))
    assert tasks == random_tasks(num_requests=5, input_len=7, output_len=3, vocab_size=11, seed=4)
    assert tasks != random_tasks(num_requests=5, input_len=7, output_len=3, vocab_size=11, seed=5)
    assert len({tuple(task.prompt) for task in tasks}) == 5


def test_lines_of_ids_and_of_text() -> None:
    tasks = read(
        {"task_id": 9, "input_ids": [1, 2, 3], "output_tokens": 4},
        "   ",
        {"prompt": "Hé", "output_tokens": 2},
        {"input_ids": [0], "output_tokens": 1, "turns": [], "category": "ignored"},
    )
    assert tasks == [Task(9, [1, 2, 3], 4), Task(1, [256, *"Hé".encode()], 2), Task(2, [0], 1)]


def test_ids_need_no_tokenizer() -> None:
    line = json.dumps({"input_ids": [5], "output_tokens": 1})
    assert read_json_lines([line], name="x", tokenizer=no_tokenizer) == [Task(0, [5], 1)]
    with pytest.raises(ValueError, match="no tokenizer"):
        read_json_lines([json.dumps({"prompt": "a", "output_tokens": 1})], name="x", tokenizer=no_tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input_ids": [1]', r"set\.jsonl:2: not valid JSON"),
        ([1, 2], r"set\.jsonl:2: not a JSON object"),
        ({"input_ids": [1]}, r"set\.jsonl:2: output_tokens must be an integer of at least 1, got null"),
        ({"input_ids": [1], "output_tokens": 0}, "output_tokens must be an integer of at least 1, got 0"),
        ({"input_ids": [1], "output_tokens": True}, "output_tokens .* got true"),
        ({"input_ids": [1], "output_tokens": 1, "task_id": "a"}, 'task_id must be an integer, got "a"'),
        ({"input_ids": [1, -1], "output_tokens": 1}, "each of input_ids must be .* got -1"),
        ({"input_ids": "1 2", "output_tokens": 1}, "input_ids must be a list"),
        ({"input_ids": [], "output_tokens": 1}, "the prompt is empty"),
        ({"output_tokens": 1}, "neither input_ids nor prompt"),
        ({"prompt": 5, "output_tokens": 1}, "prompt and turns must be texts, got 5"),
        ({"turns": ["a", {}], "output_tokens": 1}, "prompt and turns must be texts, got {}"),
        ({"prompt": "\ud800", "output_tokens": 1}, "prompt: the text has a lone surrogate"),
    ],
)
def test_a_bad_line_is_named(line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read({"input_ids": [1], "output_tokens": 1}, line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["media_paths", "lora_request"])
def test_what_is_not_built_is_refused(field: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"set\.jsonl:1: {field} is not built yet"):
        read({"input_ids": [1], "output_tokens": 1, field: ["x"]})


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set\.jsonl has no requests"):
        read("", "\n")


def test_a_file_is_taken_whole_or_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i], "output_tokens": 1}) + "\n" for i in range(5)))
    assert [task.prompt for task in load(Dataset(name=str(path)))] == [[0], [1], [2], [3], [4]]
    assert [task.prompt for task in load(Dataset(name=str(path), num_requests=2))] == [[0], [1]]
    with pytest.raises(ValueError, match="has 5 requests and --num_requests is 6"):
        load(Dataset(name=str(path), num_requests=6))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"input_ids": [3], "output_tokens": 2}\n'))
    assert load(Dataset(name="-")) == [Task(0, [3], 2)]


def test_random_has_a_default_size_and_no_need_of_a_tokenizer() -> None:
    tasks = load_tasks(Dataset(name="random", input_len=2), vocab_size=lambda: VOCAB, tokenizer=no_tokenizer)
    assert len(tasks) == DEFAULT_NUM_REQUESTS


def test_a_wrong_path_is_named() -> None:
    with pytest.raises(ValueError, match="no dataset at 'sharegtp': give random, sharegpt or a file"):
        load(Dataset(name="sharegtp"))
