"""`chat` and `generate` over the fake runtime."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from headrace.cli import chat as chat_module
from headrace.cli import generate as generate_module
from headrace.cli.chat import Conversation
from headrace.cli.main import run
from headrace.front.fake import FakeLoop, fake_info, says
from headrace.llm import LLM
from headrace.params import SamplingParams
from headrace.text.template import ChatTemplate
from tests.test_llm import make_llm

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


def opened(folder: Path, answer: str) -> LLM:
    llm = make_llm(folder, loop=FakeLoop(fake_info(max_seq_len=60), script=says([*answer.encode(), 257])))
    desk = llm._desk  # pyright: ignore[reportPrivateUsage]
    desk.text = type(desk.text)(
        source=desk.text.source,
        tokenizer=llm.tokenizer,
        template=ChatTemplate({"default": TEMPLATE}, special_tokens={}),
    )
    return llm


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let both commands open a model that says this."""

    def install(answer: str) -> None:
        def open_llm(ctx: click.Context, model: str | None) -> LLM:
            return opened(tmp_path, answer)

        monkeypatch.setattr(chat_module, "open_llm", open_llm)
        monkeypatch.setattr(generate_module, "open_llm", open_llm)

    return install


def test_generate(answers: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    answers(" world")
    assert run(["generate", "any", "hello", "--echo"]) == 0
    assert capsys.readouterr().out == "hello world\n"
    assert run(["generate", "any", "hello", "-n", "3"]) == 0
    assert capsys.readouterr().out == " wo\n"
    assert run(["generate", "any", "hello", "--stop", "r"]) == 0
    assert capsys.readouterr().out == " wo\n"


def test_generate_from_standard_input(
    answers: Callable[[str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers("!")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run(["generate", "any", "--echo"]) == 0
    assert capsys.readouterr().out == "hello!\n"


def test_chat_once(answers: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    answers("fine")
    assert run(["chat", "any", "--prompt", "how are you?"]) == 0
    assert capsys.readouterr().out == "fine\n"


def test_chat_reads_lines_and_commands(
    answers: Callable[[str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers("yes")
    lines = "one\n\ntwo\\\nmore\n/nonsense\n/reset\n" + "x" * 80 + "\nthree\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(["chat", "any"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "yes\nyes\nyes\n"
    assert "unknown command /nonsense" in captured.err
    assert "context length is 60 tokens" in captured.err


def test_a_conversation_remembers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts: list[str] = []
    with opened(tmp_path, "ok") as llm:
        original = llm.chat_prompt

        def keep(messages: Any, **variables: Any) -> list[int]:
            ids = original(messages, **variables)
            prompts.append(bytes(ids).decode())
            return ids

        llm.chat_prompt = keep  # pyright: ignore[reportAttributeAccessIssue]
        conversation = Conversation(llm, SamplingParams(max_tokens=None), system="be brief")
        conversation.say("a")
        conversation.say("b")
        with pytest.raises(ValueError, match="context length"):
            conversation.say("c" * 90)
        conversation.reset()
        conversation.say("d")
    assert prompts[:2] == ["s:be brief\nu:a\na:", "s:be brief\nu:a\na:ok\nu:b\na:"]
    assert prompts[3] == "s:be brief\nu:d\na:"
    assert capsys.readouterr().out == "ok\nok\nok\n"
