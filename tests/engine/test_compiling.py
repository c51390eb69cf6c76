"""Grammars compiled on threads of their own: kept, forgotten, found again, and failing alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.engine import compiling
from headrace.engine.compiling import Compiling
from headrace.seam import Command, Ints
from headrace.types import Grammar

NUM_IDS = 40


class FakeGrammar:
    """Its own matcher."""

    can_end = True

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def matcher(self) -> FakeGrammar:
        return self

    def advance(self, token: int) -> bool:
        return True


class FakeCompiler:
    """The spec says what happens."""

    end_ids = (0,)
    silent_ids = frozenset({0})

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.may_go_on = threading.Event()

    def compile(self, grammar: Grammar) -> Any:
        self.compiled.append(grammar.spec)
        if grammar.spec == "wrong":
            raise ValueError("it is wrong")
        if grammar.spec == "crash":
            raise RuntimeError("the library broke")
        if grammar.spec == "slow":
            assert self.may_go_on.wait(20)
        return FakeGrammar(grammar.spec)

    def fill(self, matchers: Sequence[Any], rows: Ints) -> dict[int, str]:
        if matchers[0].spec == "complex":
            return {0: "out of fuel"}
        if matchers[0].spec == "thick":
            time.sleep(1.0)
        rows[:] = 6
        return {}


def wait_for(found: Compiling, command: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        done = found.take_done()
        if command in done:
            return done[command]
        time.sleep(0.001)
    raise AssertionError("no end")


def ask(found: Compiling, number: int, spec: str) -> None:
    found.begin(Command(number, "compile_grammar", {"kind": "regex", "spec": spec}))


def test_each_ends_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_FILL_S", 0.5)
    compiler = FakeCompiler()
    found = Compiling(lambda num_ids: compiler, num_ids=NUM_IDS)
    ask(found, 0, "slow")
    for number, (spec, error) in enumerate(
        [("a", ""), ("wrong", "it is wrong"), ("crash", "the library broke"), ("complex", "out of fuel"),
         ("thick", "too long")], start=1
    ):  # fmt: skip
        ask(found, number, spec)
        result = wait_for(found, number)
        assert (error in result["error"]) if error else not result["error"]
    compiler.may_go_on.set()
    assert not wait_for(found, 0)["error"]
    ask(found, 9, "wrong")
    assert found.take_done() == {9: {"error": "it is wrong"}}  # at once, from memory
    with pytest.raises(ValueError, match="it is wrong"):
        found.get(Grammar(kind="regex", spec="wrong"))


def test_what_was_forgotten_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_KEPT", 2)
    compiler = FakeCompiler()
    found = Compiling(lambda num_ids: compiler, num_ids=NUM_IDS)
    for spec in "abca":
        found.get(Grammar(kind="regex", spec=spec))
    assert compiler.compiled == ["a", "b", "c", "a"]
    found.get(Grammar(kind="regex", spec="c"))
    found.get(Grammar(kind="choice", spec="c"))  # another kind is another grammar
    assert compiler.compiled == ["a", "b", "c", "a", "c"]


def test_no_tokenizer_or_none_that_fits() -> None:
    def refuse(num_ids: int) -> Any:
        raise ValueError(f"none for {num_ids}")

    for opener, word in ((None, "no tokenizer"), (refuse, "none for 40")):
        found = Compiling(opener, num_ids=NUM_IDS)
        ask(found, 1, "a")
        assert word in wait_for(found, 1)["error"]
