from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from headrace.params import FieldError, GuidedDecodingParams, LogprobMode, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("n", 0),
        ("n", None),
        ("best_of", 0),
        ("seed", "7"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", math.inf),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("end_id", -2),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("bad_token_ids", [1.0]),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {1: math.nan}),
        ("early_stopping", 3),
        ("logprobs_mode", "other"),
        ("truncate_prompt_tokens", 0),
        ("no_repeat_ngram_size", -1),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(FieldError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(ValueError, match=r"best_of must be at least n \(3\), got 2"):
        SamplingParams(n=3, best_of=2)


def test_edge_values_are_fine() -> None:
    params = SamplingParams(temperature=0, top_p=0, top_k=-1, min_p=1, max_tokens=0, seed=-5, logprobs=0)
    assert params.is_greedy
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(logprobs_mode="PROCESSED").logprobs_mode is LogprobMode.PROCESSED  # pyright: ignore[reportArgumentType]


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(3)  # pyright: ignore[reportCallIssue]
    assert all(field.kw_only for field in dataclasses.fields(SamplingParams))


def test_defaults_of_the_reference() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.n, params.detokenize, params.add_special_tokens) == (32, 1, True, True)
    assert params.skip_special_tokens and params.exclude_input_from_output and not params.ignore_eos
    unset = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "best_of",
        "stop",
        "logprobs",
        "end_id",
        "early_stopping",
    }
    assert all(getattr(params, name) is None for name in unset)


@pytest.mark.parametrize("field", ["beam_width_array", "top_p_reset_ids", "lookahead_config"])
def test_later_work_is_refused_on_use(field: str) -> None:
    value: Any = [1]
    params = SamplingParams(**{field: value})
    with pytest.raises(NotImplementedError, match=field):
        params.require_built()
    SamplingParams(top_p_decay=1.0, top_p_min=1e-6, top_p_reset_ids=-1).require_built()


def test_one_constraint_at_a_time() -> None:
    with pytest.raises(ValueError, match="regex and json_object"):
        GuidedDecodingParams(regex="a", json_object=True)


def test_no_torch() -> None:
    code = "import headrace.params, headrace.front.client, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
