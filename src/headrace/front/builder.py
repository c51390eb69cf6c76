"""A caller's parameters and prompt ids -> the runtime's requests: every default resolved, every check made."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import structs

from headrace import wire
from headrace.front.beams import beam_of
from headrace.front.cache import name_of, retention_of
from headrace.front.errors import RequestError, context_overflow, prompt_too_long
from headrace.front.grammars import Grammars
from headrace.params import FieldError, KvCacheRetentionConfig, LogprobMode, SamplingParams
from headrace.seeds import child_seed, random_seed
from headrace.text.bounded import TooLong, encode_at_most, encode_tail
from headrace.text.grammars.load import Backend
from headrace.text.tokenizer import Tokenizer
from headrace.types import Marker, Request, Sampling, ThinkingCap

__all__ = ["RequestBuilder", "RequestOptions", "RouteDefaults"]

GENERATION_CONFIG_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "length_penalty",
    "early_stopping",
)
"""What `generation_config: auto` takes from the checkpoint, where the request says nothing."""

MAX_TIMEOUT_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteDefaults:
    """What a way of asking makes of what requests leave open."""

    unset: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Parameters that neither the request nor the model's generation config sets."""
    max_tokens: int | None = None
    """New tokens of a request whose `max_tokens` is None, less where the context ends; None is up to there."""
    clamps_max_tokens: bool = False
    """More than the context has room for is as many as it has room for, not an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """What accompanies the sampling parameters of one prompt."""

    priority: float = 0.5
    cache_salt: str = ""
    conversation: str = ""
    """Id of the conversation that the prompt is a turn of."""
    retention: KvCacheRetentionConfig | None = None
    pin: str = ""
    """Keep the prompt's blocks under this name."""
    pooling: Literal["", "last", "mean"] = ""
    """The prompt's hidden states are wanted and no tokens: `Request.pooling`."""
    timeout_s: float | None = None
    arrival_s: float = 0.0
    """time.monotonic() from which the request's time counts; 0.0 is when it is built."""
    label: str = ""
    """The id the user sees."""
    grammar_param: str = "guided_decoding"
    """The caller's field that `SamplingParams.guided_decoding` came from, for errors."""
    grammar_starts_after: Marker = ()
    """What ends the reasoning; the grammar holds from there on. () is at once."""
    thinking: ThinkingCap | None = None
    """The limit on the reasoning, from whoever knows how this model marks it."""
    processors: int = 0
    """Key of the caller's logits processors, in the engine's process."""
    defaults: RouteDefaults = RouteDefaults()
    param: str = "prompt"
    """Name of the field that holds the prompt, for errors."""


class RequestBuilder:
    """Turns prompts into requests. Raises `RequestError` (or NotImplementedError) before any device work."""

    def __init__(
        self,
        info: wire.ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        eos_ids: frozenset[int] = frozenset(),
        generation_config: Mapping[str, Any] | None = None,
        max_input_len: int | None = None,
        grammar_backend: Backend | None = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._generation_config = generation_config or {}
        self._max_input_len = max_input_len
        self._grammars = Grammars(tokenizer, grammar_backend)

    # ---- prompts -----------------------------------------------------------------------------

    def encode(self, text: str, params: SamplingParams, *, param: str = "prompt", most: int | None = None) -> list[int]:
        """Ids of a text prompt, with one BOS at most; of one that is cut to its last tokens, at least those.

        Raises:
            RequestError: no tokenizer, no Unicode, or far more tokens than `most` (the context's length).
        """
        if self.tokenizer is None:
            raise RequestError("the prompt is text and this engine has no tokenizer: give token ids", param=param)
        limit, special = most or self.info.max_seq_len, params.add_special_tokens
        try:
            if params.truncate_prompt_tokens is not None:
                return encode_tail(self.tokenizer, text, params.truncate_prompt_tokens, add_special_tokens=special)
            ids = encode_at_most(self.tokenizer, text, limit, add_special_tokens=special)
            if most is not None and len(ids) > most:  # nobody behind this looks at it
                raise TooLong(most)
            return ids
        except TooLong:
            raise prompt_too_long(limit, limit=self.info.max_seq_len, param=param) from None
        except ValueError as error:
            raise RequestError(str(error), param=param) from None

    # ---- requests ----------------------------------------------------------------------------

    def build(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        allocate: Callable[[int], Sequence[int]],
        options: RequestOptions | None = None,
    ) -> tuple[list[Request], SamplingParams]:
        """One request for each sequence to sample, or one for a whole beam search; and the parameters as resolved.

        Args:
            allocate: gives that many new request ids.

        Raises:
            RequestError: bad input, with the field's name.
            NotImplementedError: a parameter that this version can't serve.
        """
        options = options or RequestOptions()
        params = self.resolve(params, options)
        ids = list(prompt)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        self._check_prompt(ids, options.param)
        max_tokens = self._max_tokens(len(ids), params, options)
        grammar = self._grammars.build(
            params.guided_decoding, param=options.grammar_param, starts_after=options.grammar_starts_after
        )
        beam = beam_of(params, max_width=self.info.max_beam_width)
        for name, asked in ((options.grammar_param, grammar), ("thinking_token_budget", options.thinking)):
            if beam and asked:
                raise RequestError(f"{name} can't be used with beam search: leave one of them out", param=name)
        count = 1 if beam else params.num_sequences
        sampling = self._sampling(params, options)
        seed = random_seed() if params.seed is None else params.seed
        shared = Request(
            id=0,
            prompt=ids,
            sampling=sampling,
            max_tokens=max(max_tokens, 1),
            min_tokens=params.min_tokens or 0,
            stop_ids=self._stop_ids(params),
            priority=options.priority,
            arrival_s=options.arrival_s or time.monotonic(),
            timeout_s=options.timeout_s,
            cache_salt=options.cache_salt,
            conversation=options.conversation,
            retention=retention_of(options.retention, num_prompt=len(ids)),
            pin=options.pin,
            pooling=options.pooling,
            beam=beam,
            grammar=grammar,
            thinking=options.thinking,
            label=options.label,
        )
        requests: list[Request] = []
        for index, request_id in enumerate(allocate(count)):
            own = structs.replace(sampling, seed=child_seed(seed, index))
            label = f"{options.label}/{index}" if count > 1 else options.label
            requests.append(structs.replace(shared, id=request_id, sampling=own, label=label))
        return requests, dataclasses.replace(params, max_tokens=max_tokens)

    def resolve(self, params: SamplingParams, options: RequestOptions) -> SamplingParams:
        """Fill what is unset from the model's generation config, then from the route's defaults."""
        try:
            params.validate()
            params.require_built()
            filled = {
                name: self._generation_config[name]
                for name in GENERATION_CONFIG_FIELDS
                if getattr(params, name) is None and self._generation_config.get(name) is not None
            }
            filled |= {
                name: value
                for name, value in options.defaults.unset.items()
                if name not in filled and getattr(params, name) is None
            }
            resolved = dataclasses.replace(params, **filled) if filled else params
        except FieldError as error:
            raise RequestError(str(error), param=error.field) from None
        _check_options(options)
        self._check_ids(resolved)
        if resolved.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this engine has none: use stop_token_ids",
                               param="stop")  # fmt: skip
        if resolved.thinking_token_budget is not None and options.thinking is None:
            raise RequestError("thinking_token_budget needs to know how this model marks its reasoning: give the LLM a"
                               " reasoning_parser", param="thinking_token_budget")  # fmt: skip
        if resolved.bad_strings and self.tokenizer is None:
            raise RequestError("bad words need a tokenizer and this engine has none: use bad_token_ids", param="bad")
        return resolved

    # ---- checks ------------------------------------------------------------------------------

    def _check_prompt(self, ids: list[int], param: str) -> None:
        info = self.info
        if not ids:
            raise RequestError("empty prompt: give at least one token", param=param)
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or highest >= info.num_valid_ids:
            bad = lowest if lowest < 0 else highest
            raise RequestError(
                f"token id {bad} is out of the vocabulary: ids are 0 to {info.num_valid_ids - 1}", param=param
            )
        if self._max_input_len is not None and len(ids) > self._max_input_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and max_input_len is {self._max_input_len}: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def _check_room(self, num_prompt: int, param: str) -> None:
        """What can never be scheduled must not wait in the queue."""
        info = self.info
        if num_prompt + 1 > info.max_kv_tokens:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and the KV cache holds {info.max_kv_tokens}: at most"
                f" {max(info.max_kv_tokens - 1, 0)} prompt tokens fit; shorten it or start with a larger cache",
                param=param,
                code="context_length_exceeded",
            )
        if not info.enable_chunked_prefill and num_prompt > info.max_num_tokens:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and a step takes max_num_tokens={info.max_num_tokens} without"
                " chunked prefill: shorten it or start with enable_chunked_prefill",
                param=param,
                code="context_length_exceeded",
            )

    def _check_ids(self, params: SamplingParams) -> None:
        size = self.info.num_valid_ids
        named = {
            "end_id": [] if params.end_id is None else [params.end_id],
            "stop_token_ids": params.stop_token_ids or [],
            "bad_token_ids": params.bad_token_ids or [],
            "logit_bias": list(params.logit_bias or ()),
        }
        for name, ids in named.items():
            for token_id in ids:
                if token_id >= size:
                    raise RequestError(
                        f"{name} has the token id {token_id}, and the vocabulary has {size} ids", param=name
                    )
        for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if value is not None and value > size:
                raise RequestError(f"{name} is {value}, and the vocabulary has {size} ids", param=name)

    def _max_tokens(self, num_prompt: int, params: SamplingParams, options: RequestOptions) -> int:
        limit = self.info.max_seq_len
        room = limit - num_prompt
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(room, 1) if options.defaults.max_tokens is None else options.defaults.max_tokens
        if params.max_tokens is None or options.defaults.clamps_max_tokens:
            max_tokens = min(max_tokens, max(room, 1))
        # Even a request for no tokens computes one position.
        if max(max_tokens, 1) > room:
            raise context_overflow(num_prompt=num_prompt, num_new=max_tokens, limit=limit, param=options.param)
        if (params.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens} and at most {max_tokens} tokens are generated: lower it",
                param="min_tokens",
            )
        self._check_room(num_prompt, options.param)
        _check_budget(params, options.thinking, max_tokens)
        return max_tokens

    # ---- parts of a request ------------------------------------------------------------------

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ends: set[int] = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            if params.end_id is None:
                ends |= self._eos_ids
            elif params.end_id >= 0:
                ends.add(params.end_id)
        return tuple(sorted(ends))

    def _sampling(self, params: SamplingParams, options: RequestOptions) -> Sampling:
        greedy = params.is_greedy or params.use_beam_search
        ranks_choices = params.num_sequences > params.n and not params.use_beam_search
        logprobs = 0 if params.logprobs is None and ranks_choices else params.logprobs
        return Sampling(
            temperature=0.0 if greedy else _or(params.temperature, 1.0),
            top_k=0 if greedy else max(params.top_k or 0, 0),
            top_p=1.0 if greedy else _or(params.top_p, 1.0),
            min_p=0.0 if greedy else params.min_p or 0.0,
            repetition_penalty=_or(params.repetition_penalty, 1.0),
            presence_penalty=params.presence_penalty or 0.0,
            frequency_penalty=params.frequency_penalty or 0.0,
            prompt_ignore_length=params.prompt_ignore_length or 0,
            no_repeat_ngram_size=params.no_repeat_ngram_size or 0,
            logit_bias=self._bias(params),
            bad_words=self._bad_words(params),
            logprobs=-1 if logprobs is None else logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            processed_logprobs=params.logprobs_mode is LogprobMode.PROCESSED,
            return_logits=params.return_generation_logits,
            processors=options.processors,
        )

    def _bias(self, params: SamplingParams) -> dict[int, float]:
        bias = {token_id: float(value) for token_id, value in (params.logit_bias or {}).items()}
        if params.embedding_bias is not None:
            values: list[float] = params.embedding_bias.tolist()
            if len(values) not in (self.info.vocab_size, self.info.num_valid_ids):
                raise RequestError(
                    f"embedding_bias has {len(values)} values and the vocabulary {self.info.vocab_size} ids",
                    param="embedding_bias",
                )
            for token_id, value in enumerate(values):
                if value:
                    bias[token_id] = bias.get(token_id, 0.0) + value
        return bias

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences to ban: a word is spelt one way at the start of a text and another after a space."""
        words: dict[tuple[int, ...], None] = dict.fromkeys((token_id,) for token_id in params.bad_token_ids or ())
        for text in params.bad_strings:
            assert self.tokenizer is not None
            for spelling in (text, f" {text.lstrip()}"):
                ids = tuple(self.tokenizer.encode(spelling, add_special_tokens=False))
                if ids:
                    words[ids] = None
        return tuple(words)


def _check_options(options: RequestOptions) -> None:
    if not 0 <= options.priority <= 1:
        raise RequestError(f"priority must be from 0 to 1, got {options.priority}", param="priority")
    if options.timeout_s is not None and not 0 < options.timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout must be greater than 0 s and at most {MAX_TIMEOUT_S:,}, got {options.timeout_s}", param="timeout"
        )
    for name, param in (("cache_salt", "cache_salt"), ("conversation", "conversation_id"), ("pin", "name")):
        name_of(getattr(options, name) or None, param)


def _check_budget(params: SamplingParams, cap: ThinkingCap | None, max_tokens: int) -> None:
    """A budget that the caller has asked for leaves room for an answer; a default one gives way."""
    budget = params.thinking_token_budget
    if budget is not None and cap is not None and budget + len(cap.ends[0]) >= max_tokens:
        raise RequestError(
            f"thinking_token_budget {budget} and the end of the reasoning leave nothing of {max_tokens} tokens for an"
            " answer: lower it, or allow more tokens in all",
            param="thinking_token_budget",
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
