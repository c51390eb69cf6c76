"""Request bodies to sampling parameters, with the limits that HTTP clients have."""

from __future__ import annotations

from typing import Any, cast

from headrace.front.errors import RequestError
from headrace.params import FieldError, SamplingParams
from headrace.server.bodies import ChatBody, CompletionBody, GenerationBody
from headrace.server.guided import guided_of

__all__ = ["MAX_CHOICES", "chat_params", "completion_params"]

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_ID_DIGITS = 10
MAX_ITEMS = {"stop": 256, "stop_token_ids": 256, "bad": 1024, "bad_token_ids": 8192}
"""Each costs every step something, and neighbours pay it too."""
MAX_STOP_LENGTH = 4096

SAME_NAME = (
    "min_tokens", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "prompt_ignore_length", "no_repeat_ngram_size", "bad", "bad_token_ids", "use_beam_search", "length_penalty",
    "early_stopping", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens",
    "truncate_prompt_tokens", "detokenize", "n", "thinking_token_budget",
)  # fmt: skip
"""Fields that go over as they are; null is the parameter's default."""


def chat_params(body: ChatBody) -> SamplingParams:
    """Raises RequestError naming the field."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"{param} must be at least 1, got {max_tokens}", param=param)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise RequestError(f"top_logprobs must be at least 0, got {body.top_logprobs}", param="top_logprobs")
    _check_at_most("top_logprobs", body.top_logprobs, MAX_TOP_LOGPROBS)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, max_tokens=max_tokens, logprobs=logprobs)


def completion_params(body: CompletionBody) -> SamplingParams:
    """Raises RequestError naming the field."""
    _check_at_most("logprobs", body.logprobs, MAX_TOP_LOGPROBS)
    params = _params(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


def _params(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    _check_at_most("n", body.n, MAX_CHOICES)
    _check_at_most("best_of", body.best_of, MAX_CHOICES)
    _check_at_most("prompt_logprobs", body.prompt_logprobs, MAX_TOP_LOGPROBS)
    _check_sizes(body)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(body, name)
        if value is not None and abs(value) > MAX_PENALTY:
            raise RequestError(f"{name} must be from -2 to 2, got {value}", param=name)
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=_bias(body.logit_bias),
            guided_decoding=guided_of(body).params,
            **given,
        )
    except FieldError as error:
        raise RequestError(str(error), param=error.field) from None
    if body.stream and params.num_sequences > params.n:
        raise RequestError("best_of above n can't be streamed: the best is known at the end only", param="best_of")
    return params


def _check_sizes(body: GenerationBody) -> None:
    for name, most in MAX_ITEMS.items():
        value = getattr(body, name)
        count = len(cast("list[Any]", value)) if isinstance(value, list) else 0
        if count > most:
            raise RequestError(f"{name} has {count} items; at most {most} are taken", param=name)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise RequestError(f"stop has a text of more than {MAX_STOP_LENGTH} characters: shorten it", param="stop")


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
            raise RequestError(f"logit_bias keys are token ids, got {key[:40]!r}", param="logit_bias")
        if abs(value) > MAX_BIAS:
            raise RequestError(f"logit_bias of {key} must be from -100 to 100, got {value}", param="logit_bias")
        bias[int(key)] = value
    return bias


def _check_at_most(name: str, value: Any, most: int) -> None:
    if value is not None and value > most:
        raise RequestError(f"{name} must be at most {most}, got {value}", param=name)
