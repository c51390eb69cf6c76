from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.prepare import (
    conversation_rows,
    fixed_rows,
    mooncake_rows,
    multi_turn_rows,
    normal_rows,
    uniform_rows,
    write_rows,
)
from headrace.bench.workload import Task, read_json_lines
from headrace.text.tokenizer import ByteTokenizer

VOCAB = 50


def tasks(rows: Any, tmp_path: Path) -> list[Task]:
    path = tmp_path / "set.jsonl"
    write_rows(rows, path)
    with path.open() as file:
        return read_json_lines(file, name="set", tokenizer=ByteTokenizer)


def test_fixed_lengths_with_a_shared_beginning(tmp_path: Path) -> None:
    found = tasks(
        fixed_rows(num_requests=3, input_len=6, output_len=2, shared_len=4, vocab_size=VOCAB, seed=1), tmp_path
    )
    assert [(len(task.prompt), task.num_output) for task in found] == [(6, 2)] * 3
    assert len({tuple(task.prompt[:4]) for task in found}) == 1 and len({tuple(task.prompt) for task in found}) == 3
    with pytest.raises(ValueError, match="--shared_len is 6"):
        list(fixed_rows(num_requests=1, input_len=6, output_len=1, shared_len=6, vocab_size=VOCAB, seed=0))


def test_drawn_lengths(tmp_path: Path) -> None:
    normal = tasks(
        normal_rows(
            num_requests=400, input_mean=40, input_stdev=5, output_mean=1, output_stdev=2, vocab_size=VOCAB, seed=2
        ),
        tmp_path,
    )
    lengths = [len(task.prompt) for task in normal]
    assert sum(lengths) / 400 == pytest.approx(40, abs=1) and 20 < min(lengths) < max(lengths) < 60
    assert min(task.num_output for task in normal) == 1
    uniform = tasks(
        uniform_rows(num_requests=400, input_min=3, input_max=5, output_min=1, output_max=2, vocab_size=VOCAB, seed=2),
        tmp_path,
    )
    assert {len(task.prompt) for task in uniform} == {3, 4, 5} and {task.num_output for task in uniform} == {1, 2}
    with pytest.raises(ValueError, match="--input_min is 3 and --input_max 2"):
        list(uniform_rows(num_requests=1, input_min=3, input_max=2, output_min=1, output_max=1, vocab_size=9, seed=0))


def test_turns(tmp_path: Path) -> None:
    rows = multi_turn_rows(
        num_conversations=2, num_turns=2, system_len=3, turn_len=2, output_len=4, vocab_size=VOCAB, seed=0
    )
    found = tasks(rows, tmp_path)
    assert [(task.task_id, len(task.prompt), task.after) for task in found] == [
        (0, 5, None),
        (0, 2, 0),
        (1, 5, None),
        (1, 2, 2),
    ]
    assert found[0].prompt[:3] == found[2].prompt[:3]
    texts = read_json_lines(['{"turns": ["ab", "c"], "output_tokens": 1}'], name="x", tokenizer=ByteTokenizer)
    assert [list(task.prompt) for task in texts] == [[256, 97, 98], [99]]


def test_conversations(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    talks = [[("human", "hello"), ("gpt", "an answer"), ("human", "more"), ("gpt", "yes")], [("human", "x" * 99)]]
    path.write_text(
        json.dumps([{"conversations": [{"from": who, "value": text} for who, text in talk]} for talk in talks])
    )
    sizes: dict[str, Any] = {"num_requests": 1, "min_input_len": 2, "max_input_len": 20, "seed": 0}
    one = list(conversation_rows(path, ByteTokenizer(), max_turns=1, output_len=None, **sizes))
    assert one == [{"task_id": 0, "prompt": "hello", "output_tokens": 9}]
    two = list(conversation_rows(path, ByteTokenizer(), max_turns=2, output_len=7, **sizes))
    assert two == [{"task_id": 0, "turns": ["hello", "more"], "output_tokens": 7}]
    with pytest.raises(ValueError, match="has 1 conversations of 2 to 20 tokens and 5 are wanted"):
        list(conversation_rows(path, ByteTokenizer(), max_turns=1, output_len=1, **{**sizes, "num_requests": 5}))


def test_a_trace_keeps_its_times_and_shared_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 700, "output_length": 0, "hash_ids": [7, 9]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    first, second = tasks(
        mooncake_rows(io.StringIO(text), name="t", num_requests=0, vocab_size=VOCAB, seed=0), tmp_path
    )
    assert (first.at_s, second.at_s, len(first.prompt), len(second.prompt), second.num_output) == (
        0.5,
        1.5,
        600,
        700,
        1,
    )
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:] != second.prompt[512:600]
    with pytest.raises(ValueError, match="t:1: no input_length"):
        list(mooncake_rows(io.StringIO('{"timestamp": 1}'), name="t", num_requests=0, vocab_size=9, seed=0))
