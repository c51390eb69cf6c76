from __future__ import annotations

from typing import Any

import pytest

from headrace.front.builder import RequestOptions, RouteDefaults
from headrace.front.errors import RequestError
from headrace.front.fake import fake_info
from headrace.params import SamplingParams
from headrace.seeds import child_seed

from .making import EOS, build, counted, ids_of, make_builder

PROMPT = ids_of("hello")


class TestSampling:
    def test_nothing_said_is_greedy(self) -> None:
        sampling = build(PROMPT)[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)

    @pytest.mark.parametrize(
        "params", [{"temperature": 0}, {"temperature": 9e-6}, {"top_p": 0}, {"top_k": 1}, {"min_p": 1}]
    )
    def test_extreme_values_are_greedy(self, params: dict[str, float]) -> None:
        assert build(PROMPT, **params)[0].sampling.temperature == 0.0
        assert build(PROMPT, temperature=0.7, **{k: v for k, v in params.items() if k != "temperature"} or
                     {"top_p": 0})[0].sampling.temperature == 0.0  # fmt: skip

    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            ({"top_p": 0.5}, (1.0, 0, 0.5, 0.0)),
            ({"temperature": 0.3}, (0.3, 0, 1.0, 0.0)),
            ({"top_k": 7}, (1.0, 7, 1.0, 0.0)),
            ({"top_k": -1}, (1.0, 0, 1.0, 0.0)),
            ({"min_p": 0.2, "temperature": 2}, (2, 0, 1.0, 0.2)),
        ],
    )
    def test_the_missing_ones_are_neutral(self, params: dict[str, float], expected: tuple[float, ...]) -> None:
        sampling = build(PROMPT, **params)[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == expected

    def test_generation_config_fills_only_what_is_unset_then_the_route(self) -> None:
        builder = make_builder(generation_config={"temperature": 0.6, "top_k": 5, "max_length": 9, "top_p": None})
        options = RequestOptions(defaults=RouteDefaults(unset={"temperature": 1.0, "top_p": 0.9}))
        sampling = build(PROMPT, builder, options, top_k=3)[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 3, 0.9)

    def test_bias_adds_up(self) -> None:
        class Vector(list[float]):
            def tolist(self) -> list[float]:
                return list(self)

        bias = Vector([0.0] * 258)
        bias[7] = 1.5
        assert build(PROMPT, embedding_bias=bias, logit_bias={7: 1, 9: -2})[0].sampling.logit_bias == {7: 2.5, 9: -2.0}
        with pytest.raises(RequestError, match="embedding_bias has 3 values and the vocabulary 258"):
            build(PROMPT, embedding_bias=Vector([1.0, 2.0, 3.0]))

    def test_bad_words_at_the_start_and_after_a_space(self) -> None:
        words = build(PROMPT, bad=["ab"], bad_token_ids=[3])[0].sampling.bad_words
        assert words == ((3,), (97, 98), (32, 97, 98))


class TestChoices:
    def test_each_choice_is_a_request_with_a_seed_of_its_own(self) -> None:
        requests = build(PROMPT, n=3, temperature=1.0, seed=7)
        assert [request.sampling.seed for request in requests] == [child_seed(7, index) for index in range(3)]
        assert len({request.id for request in requests}) == 3
        assert requests == build(PROMPT, n=3, temperature=1.0, seed=7) or requests[0].arrival_s > 0

    def test_unseeded_requests_differ(self) -> None:
        assert build(PROMPT, temperature=1.0)[0].sampling.seed != build(PROMPT, temperature=1.0)[0].sampling.seed

    def test_best_of_needs_logprobs_to_choose_by(self) -> None:
        requests = build(PROMPT, n=1, best_of=3, temperature=1.0)
        assert len(requests) == 3 and all(request.sampling.logprobs == 0 for request in requests)
        assert build(PROMPT, n=3, temperature=1.0)[0].sampling.logprobs == -1

    def test_a_beam_search_is_one_request(self) -> None:
        (request,) = build(PROMPT, n=2, best_of=3, use_beam_search=True, length_penalty=0.5, early_stopping="never")
        assert request.beam is not None
        assert (request.beam.width, request.beam.num_return) == (3, 2)
        assert (request.beam.length_penalty, request.beam.early_stopping) == (0.5, 2)
        assert request.sampling.temperature == 0.0

    @pytest.mark.parametrize(
        "params",
        [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"top_p": 0.9}, {"temperature": 0.5}, {"logprobs": 2}],
    )
    def test_beam_search_refuses_what_it_can_not_do(self, params: dict[str, Any]) -> None:
        with pytest.raises(RequestError) as error:
            build(PROMPT, n=2, use_beam_search=True, **params)
        assert error.value.param == next(iter(params))

    def test_beam_width_has_a_limit(self) -> None:
        with pytest.raises(RequestError, match="max_beam_width is 4") as error:
            build(PROMPT, n=5, use_beam_search=True)
        assert error.value.param == "n"


class TestEnds:
    def test_eos_and_stop_ids(self) -> None:
        assert build(PROMPT)[0].stop_ids == (EOS,)
        assert build(PROMPT, stop_token_ids=[3])[0].stop_ids == (3, EOS)
        assert build(PROMPT, end_id=5)[0].stop_ids == (5,)
        assert build(PROMPT, end_id=-1)[0].stop_ids == ()
        assert build(PROMPT, ignore_eos=True, stop_token_ids=[3])[0].stop_ids == (3,)

    def test_a_model_without_eos(self) -> None:
        request = build(PROMPT, make_builder(eos_ids=frozenset()), min_tokens=4)[0]
        assert request.stop_ids == () and request.min_tokens == 4

    def test_max_tokens(self) -> None:
        builder = make_builder(fake_info(max_seq_len=100))
        assert build(PROMPT, builder)[0].max_tokens == 32
        assert build(PROMPT, builder, max_tokens=None)[0].max_tokens == 95
        sixteen = RequestOptions(defaults=RouteDefaults(max_tokens=16))
        assert build(PROMPT, builder, sixteen, max_tokens=None)[0].max_tokens == 16
        assert build([1] * 90, builder, sixteen, max_tokens=None)[0].max_tokens == 10

    def test_no_tokens_still_computes_one(self) -> None:
        requests, params = make_builder().build(PROMPT, SamplingParams(max_tokens=0), allocate=counted())
        assert requests[0].max_tokens == 1 and params.max_tokens == 0

    def test_min_tokens_above_max_tokens(self) -> None:
        with pytest.raises(RequestError, match="min_tokens is 9 and at most 4") as error:
            build(PROMPT, min_tokens=9, max_tokens=4)
        assert error.value.param == "min_tokens"


class TestRefusals:
    @pytest.mark.parametrize(("prompt", "id_"), [([1, 258], 258), ([-1, 2], -1), ([5, 10**9], 10**9)])
    def test_ids_outside_the_vocabulary(self, prompt: list[int], id_: int) -> None:
        with pytest.raises(RequestError, match=f"token id {id_} is out of the vocabulary: ids are 0 to 257"):
            build(prompt)

    def test_empty_prompt(self) -> None:
        with pytest.raises(RequestError, match="empty prompt"):
            build([])

    @pytest.mark.parametrize("num_prompt", [91, 100, 101])
    def test_context_overflow_has_the_three_numbers(self, num_prompt: int) -> None:
        with pytest.raises(RequestError) as error:
            build([1] * num_prompt, make_builder(fake_info(max_seq_len=100)), max_tokens=10)
        assert error.value.code == "context_length_exceeded"
        assert all(str(number) in error.value.message for number in (num_prompt, 10, 100, num_prompt + 10))

    def test_a_full_context_leaves_no_room(self) -> None:
        for max_tokens in (None, 0):
            with pytest.raises(RequestError, match="context length is 100"):
                build([1] * 100, make_builder(fake_info(max_seq_len=100)), max_tokens=max_tokens)

    def test_the_kv_pool_bounds_the_prompt(self) -> None:
        builder = make_builder(fake_info(kv_num_blocks=2))
        assert build([1] * 63, builder)[0].prompt == [1] * 63
        with pytest.raises(RequestError, match="at most 63 prompt tokens fit"):
            build([1] * 64, builder)

    def test_max_input_len(self) -> None:
        with pytest.raises(RequestError, match="max_input_len is 4"):
            build(PROMPT, make_builder(max_input_len=4))

    @pytest.mark.parametrize(
        ("params", "param"),
        [
            ({"logit_bias": {258: 1.0}}, "logit_bias"),
            ({"stop_token_ids": [900]}, "stop_token_ids"),
            ({"bad_token_ids": [258]}, "bad_token_ids"),
            ({"end_id": 258}, "end_id"),
            ({"logprobs": 300}, "logprobs"),
        ],
    )
    def test_ids_and_counts_name_their_field(self, params: dict[str, Any], param: str) -> None:
        with pytest.raises(RequestError, match="258") as error:
            build(PROMPT, **params)
        assert error.value.param == param

    def test_stop_strings_need_a_tokenizer(self) -> None:
        builder = make_builder(tokenizer=None)
        assert build(PROMPT, builder)[0].prompt == PROMPT
        with pytest.raises(RequestError) as error:
            build(PROMPT, builder, stop="x")
        assert error.value.param == "stop"
        with pytest.raises(RequestError, match="no tokenizer"):
            builder.encode("text", SamplingParams())

    def test_later_work_is_named(self) -> None:
        with pytest.raises(NotImplementedError, match="top_p_decay"):
            build(PROMPT, top_p_decay=0.5)

    def test_assigned_values_are_checked_again(self) -> None:
        params = SamplingParams()
        params.top_p = 3
        with pytest.raises(RequestError, match="top_p must be from 0 to 1, got 3") as error:
            make_builder().build(PROMPT, params, allocate=counted())
        assert error.value.param == "top_p"

    def test_priority(self) -> None:
        with pytest.raises(RequestError, match="priority must be from 0 to 1"):
            build(PROMPT, options=RequestOptions(priority=1.5))


def test_text_has_one_bos() -> None:
    builder = make_builder()
    assert builder.encode("a", SamplingParams()) == [256, 97]
    assert builder.encode("a", SamplingParams(add_special_tokens=False)) == [97]
    with pytest.raises(RequestError, match="surrogate"):
        builder.encode("\ud800", SamplingParams())


def test_truncation_keeps_the_end() -> None:
    assert build([1, 2, 3, 4], truncate_prompt_tokens=2)[0].prompt == [3, 4]
