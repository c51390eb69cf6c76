from __future__ import annotations

from pathlib import Path

import pytest

from headrace.eval.exact import Asking, Item, measure_exact_match, read_items
from tests.eval.fake import FakeModel

ITEMS = [Item("1+1", ("2",)), Item("2+2", ("4", "four")), Item("3+3", ("6",))]


def answering(text: str) -> str:
    return " So it is  " + {"1+1": "2", "2+2": "Four", "3+3": "7"}[text.rsplit("Question: ", 1)[1][:3]] + ". "


def test_answers_are_read_out_and_compared() -> None:
    asking = Asking(extract=r"is\s+(\w+)", ignores_case=True)
    found = measure_exact_match(FakeModel(answering), ITEMS, asking)
    assert [(each.extracted, each.is_right) for each in found] == [("2", True), ("four", True), ("7", False)]
    assert not measure_exact_match(FakeModel(answering), ITEMS, Asking(extract=r"is\s+(\w+)"))[1].is_right
    assert measure_exact_match(FakeModel(answering), ITEMS, Asking(extract="zzz"))[0].extracted is None
    assert measure_exact_match(FakeModel(lambda _: " 2 "), ITEMS, Asking())[0].is_right
    assert Asking(extract=r"\d").read("1 and 2") == "2"


def test_a_question_is_never_its_own_example() -> None:
    model = FakeModel(answering)
    measure_exact_match(model, ITEMS, Asking(num_shots=2))
    assert model.prompts[1] == "<bos>Question: 1+1\nAnswer: 2\n\nQuestion: 3+3\nAnswer: 6\n\nQuestion: 2+2\nAnswer:"
    assert model.wanted[0].stop == ("\n",) and model.wanted[0].temperature == 0
    with pytest.raises(ValueError, match="--num_shots is 3 and there are 2 other items"):
        measure_exact_match(model, ITEMS, Asking(num_shots=3))


def test_chats_have_examples_as_turns() -> None:
    model = FakeModel(lambda _: "x")
    measure_exact_match(model, ITEMS[:1], Asking(num_shots=1, is_chat=True, prompt="{question}"), shots=ITEMS)
    assert model.prompts == ["<user>2+2<assistant>4<user>1+1<assistant>"]


def test_bad_files_and_expressions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    for line, problem in (
        ("{", "q.jsonl:2: not valid JSON"),
        ('{"answer": "a"}', "q.jsonl:2: question must be a text, got null"),
        ('{"question": "a", "answer": 3}', "q.jsonl:2: answer must be a text or a list of texts, got 3"),
        ('{"question": "a", "answer": []}', "answer must be"),
    ):
        path.write_text('{"question": "a", "answer": "b"}\n' + line)
        with pytest.raises(ValueError, match=problem):
            read_items(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no questions"):
        read_items(path)
    with pytest.raises(ValueError, match="--extract is no regular expression"):
        Asking(extract="(")
    with pytest.raises(ValueError, match="--prompt must have {question}"):
        Asking(prompt="x")
