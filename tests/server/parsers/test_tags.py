"""Calls that have to be made are valid by construction: whatever a format's grammar lets through is parsed as such."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from headrace import plugins
from headrace.server.parsers._tags import forced_calls, later_part, strict_calls
from headrace.server.parsers.port import CallTags, Tool
from headrace.text.grammars.llguidance import LlguidanceCompiler, LlguidanceMatcher
from headrace.text.grammars.vocabulary import Vocabulary
from headrace.types import Grammar
from tests.kits.parser import load, machine, parse, play

NAMES = [name for name in plugins.names("server.parsers") if load(name).calls]
TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "find",
            {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "kind": {"type": "string", "enum": ["a", "b c"]},
                    "where": {
                        "type": "object",
                        "properties": {
                            "x": {"type": "number"},
                            "names": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["x"],
                        "additionalProperties": False,
                    },
                },
                "required": ["text", "where"],
                "additionalProperties": False,
            },
        ),
        Tool("stop", {"type": "object", "properties": {}, "additionalProperties": False}),
    )
}
WORDS = ("Köln", "two words", "7", "12", "0.5", "true", "a", "b c", '"', ",", ", ", ":", ": ", "{", "}", "[", "]", " ",
         "0", '"text"', '"count"', '"kind"', '"where"', '"x"', '"names"', '"}', '": "', '", "')  # fmt: skip


SPECIAL = sorted({token for name in ("deepseek_v3", "kimi_k2", "kimi_k3", "mistral", "gemma4", "openai")
                  for token in getattr(load(name).calls, "tokens", ())})  # fmt: skip
"""Markers that are special tokens in those models' vocabularies: no text may hold them."""
IDS = {token: 256 + index for index, token in enumerate(SPECIAL)}
END = 256 + len(SPECIAL)
VOCABULARY = Vocabulary(
    tokens=[*(bytes([value]) for value in range(256)), *(b"" for _ in range(len(SPECIAL) + 1))],
    special=IDS,
    silent_ids=frozenset(range(256, END + 1)),
    end_ids=(END,),
    encode=lambda text: list(text.encode()),
)
PARTS = re.compile("(" + "|".join(map(re.escape, sorted(SPECIAL, key=len, reverse=True))) + ")")
LETTERS = [*(chr(value) for value in range(32, 127)), "\n", "｜", *SPECIAL]


def compile_tree(tree: Any) -> Any:
    return LlguidanceCompiler(VOCABULARY).compile(Grammar(kind="structural_tag", spec=json.dumps(tree)))


def tokens_of(text: str) -> list[int]:
    return [token for part in PARTS.split(text) for token in ([IDS[part]] if part in IDS else part.encode())]


def tags_of(name: str) -> CallTags:
    calls = load(name).calls
    assert calls is not None
    return calls.tags


def markers_in(tree: Any) -> set[str]:
    """All literal texts of a tree."""
    if isinstance(tree, dict):
        own = {tree[key] for key in ("begin", "end", "value", "separator") if isinstance(tree.get(key), str)}
        return own.union(*(markers_in(value) for value in tree.values()))
    return set().union(*(markers_in(item) for item in tree)) if isinstance(tree, list) else set()


def walk(grammar: Any, rng: random.Random, words: Sequence[str], most: int = 90) -> str | None:
    """A text that the grammar lets through; None: the walk didn't end in time."""
    matcher: LlguidanceMatcher = grammar.matcher()
    text = ""
    for _ in range(most):
        if matcher.can_end and rng.random() < 0.7:
            return text
        for word in [*rng.sample(words, len(words)), *rng.sample(LETTERS, len(LETTERS))]:
            after = _take(matcher, word)
            if after is not None:
                matcher, text = after, text + word
                break
        else:
            assert matcher.can_end, f"stuck behind {text!r}"  # not even a letter goes on
            return text
    return None


def _take(matcher: LlguidanceMatcher, word: str) -> LlguidanceMatcher | None:
    """The matcher behind the word; None, and unchanged, if it can't come."""
    tokens = tokens_of(word)
    if not word or matcher.inner.validate_tokens(tokens) < len(tokens):
        return None
    assert all(matcher.advance(token) for token in tokens)
    return matcher


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_let_through_is_a_valid_call(name: str) -> None:
    tree = forced_calls(tags_of(name), list(TOOLS.values()), many=True)
    grammar = compile_tree(tree)
    words = [*{part for mark in markers_in(tree) for part in (mark, *re.findall(r"\w+|[^\w｜▁]", mark))}, *WORDS]
    words.sort()
    rng = random.Random(name)
    num_done = 0
    for _ in range(12):
        text = walk(grammar, rng, words)
        if text is None:
            continue
        num_done += 1
        parsed = parse(play(machine(name, tools=TOOLS), text))
        assert not parsed.content and not parsed.reasoning, text
        assert parsed.calls, text
        for call in parsed.calls:
            assert call.is_whole, text
            jsonschema.validate(call.arguments, dict(TOOLS[call.name].parameters))
    assert num_done >= 1, "no walk came to an end"


@pytest.mark.parametrize("name", NAMES)
def test_no_other_name_and_no_prose(name: str) -> None:
    tree = forced_calls(tags_of(name), [TOOLS["stop"]], many=False)
    grammar = compile_tree(tree)
    assert not grammar.matcher().can_end
    text = walk(grammar, random.Random(1), [*sorted(markers_in(tree) - {""}), "0", "{", "}"])
    assert text is not None and "stop" in text
    assert _take(grammar.matcher(), "I would rather") is None
    assert _take(grammar.matcher(), text.replace("stop", "find")) is None


@pytest.mark.parametrize("name", [name for name in NAMES if not load(name).whole and load(name).calls])
def test_strict_tools_leave_prose_free(name: str) -> None:
    tree = strict_calls(tags_of(name), list(TOOLS.values()), many=True)
    matcher = _take(compile_tree(tree).matcher(), "I think so. ")
    assert matcher is not None and matcher.can_end
    forced = walk(
        compile_tree(forced_calls(tags_of(name), [TOOLS["stop"]], many=False)),
        random.Random(1),
        [*sorted(markers_in(tree) - {""}), "0", "{", "}"],
    )
    assert forced is not None and _take(matcher, forced) is not None
    trigger = tags_of(name).trigger
    assert _take(matcher, forced[: len(trigger)] + "nonsense") is None


@pytest.mark.parametrize("name", [name for name in plugins.names("server.parsers") if load(name).thinking])
def test_an_answer_may_come_behind_reasoning_or_at_once(name: str) -> None:
    format = load(name)
    assert format.thinking is not None
    answer: Any = {
        "type": "json_schema",
        "json_schema": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    begin, end = format.answer
    thought = f"{format.thinking.begin}I {{think}}{format.thinking.end}{format.thinking.between}"
    either = later_part(format.thinking, answer, answer=format.answer, is_open=False)
    for text in (f'{begin}{{"a": 1}}{end}', f'{thought}{begin}{{"a": 1}}{end}'):
        matcher = _take(compile_tree(either).matcher(), text)
        assert matcher is not None and matcher.can_end, text
    assert _take(compile_tree(either).matcher(), "a") is None
    assert _take(compile_tree(either).matcher(), f"{thought}{begin}a") is None
    behind = later_part(format.thinking, answer, answer=format.answer, is_open=True)
    matcher = _take(compile_tree(behind).matcher(), f'{format.thinking.between}{begin}{{"a": 1}}{end}')
    assert matcher is not None and matcher.can_end
