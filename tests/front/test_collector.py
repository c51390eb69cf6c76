from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.collector import Collector
from headrace.params import SamplingParams
from headrace.types import Delta, FinishReason, Logprobs

from .making import EOS, TOKENIZER, build, counted, ids_of, make_builder


def collect(*, streaming: bool = True, **params: Any) -> Collector:
    requests, resolved = make_builder().build(ids_of("hi"), SamplingParams(**params), allocate=counted())
    return Collector(requests, resolved, tokenizer=TOKENIZER, streaming=streaming)


def feed(
    collector: Collector, tokens: list[int], *, finish: FinishReason | None = None, choice: int = 0, **more: Any
) -> None:
    receiver = collector.receivers[choice]
    stop_token = tokens[-1] if finish == "stop" else None
    receiver.apply(Delta(id=receiver.request_id, tokens=tokens, finish=finish, stop_token=stop_token, **more))


def test_plain_tokens_and_deltas_are_the_same_thing() -> None:
    one, other = collect(), collect()
    for token in ids_of("héllo"):
        one.choices[0].add_token(token)
    feed(one, [], finish="length")
    feed(other, ids_of("héllo"), finish="length")
    assert one.choices[0].text == other.choices[0].text == "héllo"
    assert one.choices[0].token_ids == other.choices[0].token_ids == ids_of("héllo")


@settings(max_examples=60)
@given(
    text=st.text(min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="ab€ ", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(1, 4), min_size=1),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_streamed_text_is_the_whole_text_for_every_split(
    text: str, stop: list[str], cuts: list[int], include: bool, min_tokens: int
) -> None:
    tokens = ids_of(text)
    params: dict[str, Any] = {"stop": stop or None, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    results = []
    for streaming, sizes in ((True, cuts), (True, [1]), (False, [len(tokens)])):
        collector = collect(streaming=streaming, max_tokens=1000, **params)
        at, turn = 0, 0
        while at < len(tokens):
            size = sizes[turn % len(sizes)]
            part, last = tokens[at : at + size], at + size >= len(tokens)
            feed(collector, part, finish="length" if last else None)
            at, turn = at + size, turn + 1
        choice = collector.choices[0]
        results.append((choice.text, choice.token_ids, choice.finish, choice.stop_reason))
    assert results[0] == results[1] == results[2]
    if results[0][2] == "length":
        assert results[0][0] == TOKENIZER.decode(tokens)


class TestEnds:
    def test_eos_is_kept_among_the_ids_and_is_no_reason(self) -> None:
        collector = collect()
        feed(collector, [*ids_of("ab"), EOS], finish="stop")
        choice = collector.choices[0]
        assert (choice.text, choice.token_ids, choice.finish, choice.stop_reason) == (
            "ab", [*ids_of("ab"), EOS], "stop", None)  # fmt: skip
        assert collector.usage().completion_tokens == 3

    @pytest.mark.parametrize("streaming", [True, False])
    @pytest.mark.parametrize(("include", "text", "num_ids"), [(False, "ab", 2), (True, "ab!", 3)])
    def test_a_stop_id_is_the_reason_and_shown_on_demand(
        self, streaming: bool, include: bool, text: str, num_ids: int
    ) -> None:
        collector = collect(
            streaming=streaming, stop_token_ids=[ord("!")], include_stop_str_in_output=include, logprobs=0
        )
        entries = [Logprobs([t], [-1.0], [1]) for t in ids_of("ab!")]
        feed(collector, ids_of("ab!"), finish="stop", logprobs=entries)
        choice = collector.choices[0]
        assert (choice.text, len(choice.token_ids), len(choice.logprobs)) == (text, num_ids, num_ids)
        assert (choice.finish, choice.stop_reason) == ("stop", ord("!"))
        assert collector.usage().completion_tokens == 3

    def test_a_stop_string_ends_before_what_comes_later(self) -> None:
        collector = collect(stop=["lo w"], logprobs=0)
        entries = [Logprobs([t], [-1.0], [1]) for t in ids_of("hello world")]
        feed(collector, ids_of("hello world"), finish="length", logprobs=entries)
        choice = collector.choices[0]
        assert (choice.text, choice.finish, choice.stop_reason) == ("hel", "stop", "lo w")
        assert choice.token_ids == ids_of("hello w") and len(choice.logprobs) == 7
        feed(collector, ids_of("more"), finish="abort")
        assert (choice.text, choice.finish) == ("hel", "stop")

    def test_a_cancelled_choice_keeps_what_was_held_back(self) -> None:
        collector = collect(stop=["xyz"])
        feed(collector, ids_of("abxy"))
        assert collector.choices[0].text == "ab"
        collector.cancel()
        assert (collector.choices[0].text, collector.choices[0].finish) == ("abxy", "cancelled")
        assert collector.is_done

    def test_no_tokens_asked_for(self) -> None:
        collector = collect(max_tokens=0, prompt_logprobs=0)
        entries = [None, Logprobs([105], [-2.0], [4])]
        feed(collector, ids_of("x"), finish="length", prompt_logprobs=entries)
        assert (collector.choices[0].token_ids, collector.choices[0].finish) == ([], "length")
        assert collector.prompt_logprobs == entries and collector.usage().completion_tokens == 0

    def test_without_text(self) -> None:
        collector = collect(detokenize=False)
        feed(collector, ids_of("abc"), finish="length")
        assert (collector.choices[0].text, collector.choices[0].token_ids) == ("", ids_of("abc"))
        collector = collect(detokenize=False, stop="b")
        feed(collector, ids_of("abc"))
        assert (collector.choices[0].text, collector.choices[0].finish) == ("", "stop")


class TestChoices:
    def test_the_likeliest_of_best_of_renumbered(self) -> None:
        collector = collect(n=2, best_of=3, temperature=1.0)
        for choice, (token, value) in enumerate([(97, -3.0), (98, -1.0), (99, -2.0)]):
            feed(collector, [token], finish="length", choice=choice, logprobs=[Logprobs([token], [value], [1])])
        assert [(choice.index, choice.text) for choice in collector.best()] == [(0, "b"), (1, "c")]
        assert collector.usage().completion_tokens == 3 and collector.usage().prompt_tokens == 2

    def test_one_that_fails_ends_all(self) -> None:
        collector = collect(n=2, temperature=1.0)
        feed(collector, [97], choice=1)
        feed(collector, [], finish="error", error="broken")
        assert collector.error == "broken" and collector.is_done
        assert [choice.finish for choice in collector.choices] == ["cancelled", "cancelled"]

    def test_cached_tokens_are_the_first_choices(self) -> None:
        collector = collect(n=2, temperature=1.0)
        feed(collector, [97], choice=1, cached_tokens=32)
        feed(collector, [97], choice=0, cached_tokens=16)
        assert collector.usage().cached_tokens == 16


def test_a_stop_string_may_not_fire_before_min_tokens() -> None:
    collector = collect(stop=["b"], min_tokens=3)
    for token in ids_of("abbab"):
        collector.choices[0].add_token(token)
    assert (collector.choices[0].text, collector.choices[0].finish) == ("abba", "stop")
    assert build(ids_of("hi"), min_tokens=3)[0].min_tokens == 3
