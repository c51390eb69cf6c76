"""Public values of a request: how to sample, and the small objects that accompany a prompt. No torch."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.config.kv import KvCacheRetentionConfig, TokenRangeRetentionConfig
from headrace.types import GREEDY_TEMPERATURE

__all__ = [
    "ConversationParams",
    "DisaggregatedParams",
    "FieldError",
    "GuidedDecodingParams",
    "KvCacheRetentionConfig",
    "LoRARequest",
    "LogprobMode",
    "SamplingParams",
    "ScheduleStyle",
    "SchedulingParams",
    "TokenRangeRetentionConfig",
]


class LogprobMode(str, enum.Enum):
    """Which distribution log-probabilities are taken from."""

    RAW = "raw"
    """The model's own."""
    PROCESSED = "processed"
    """After penalties, temperature and filters: the one that was sampled."""


class FieldError(ValueError):
    """A field out of its range; `field` is its name, the message begins with it."""

    def __init__(self, field_name: str, problem: str) -> None:
        super().__init__(f"{field_name} {problem}")
        self.field = field_name


@dataclass(kw_only=True)
class GuidedDecodingParams:
    """A constraint on the text; exactly one field may be set."""

    json: Any = None
    """JSON Schema as text, dict or pydantic model."""
    regex: str | None = None
    grammar: str | None = None
    """EBNF."""
    json_object: bool = False
    structural_tag: Any = None
    """Text with constrained parts, as text or dict: xgrammar's `format` trees, or `structures` and `triggers`."""
    choice: list[str] | None = None
    """The whole output is one of these."""

    def __post_init__(self) -> None:
        if len(self.chosen) > 1:
            names = " and ".join(self.chosen)
            raise FieldError("guided_decoding", f"takes one constraint, got {names}: keep one")

    @property
    def chosen(self) -> list[str]:
        """Names of the fields that are set."""
        named = ("json", "regex", "grammar", "structural_tag", "choice")
        return [name for name in named if getattr(self, name) is not None] + ["json_object"] * self.json_object


@dataclass(kw_only=True)
class SamplingParams:
    """How to generate. `None` means the engine's default, given in each field's comment.

    Without temperature, top_p, top_k and min_p the output is greedy; it also is with `temperature=0` (or below 1e-5),
    `top_p=0`, `top_k=1` or `min_p=1`. Otherwise missing ones are 1.0, 1, 0 (all) and 0. Log-probabilities are in nats.

    Raises:
        ValueError: a value out of its range, naming the field. What needs the model or the tokenizer (ids, lengths) is
            checked when a request is made.
    """

    # Ends
    end_id: int | None = None
    """Token that ends the sequence; None is the model's EOS tokens, -1 is none."""
    pad_id: int | None = None
    """Has no effect: nothing is padded."""
    max_tokens: int | None = 32
    """Most new tokens; None is up to the context length."""
    min_tokens: int | None = None
    """New tokens before an EOS token, a stop id or a stop string may end the sequence (0)."""
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the stop id's text, in the output."""
    ignore_eos: bool = False

    # Choices
    n: int = 1
    best_of: int | None = None
    """Sequences generated, of which the `n` best by cumulative log-probability are returned (n)."""
    use_beam_search: bool = False
    """Beam search of width `best_of` or `n`."""
    beam_width_array: list[int] | None = None
    beam_search_diversity_rate: float | None = None
    length_penalty: float | None = None
    """Beams are ranked by cumulative log-probability / length ** length_penalty (0); -10 to 10."""
    early_stopping: int | Literal["never"] | None = None
    """Beam search: 1 stops at `width` finished beams, 0 when none can improve, 2 or "never" explores all (1)."""

    # Distribution
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 are all tokens."""
    min_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    """Repeats the request's output in any batch; None draws a new one for each request."""
    repetition_penalty: float | None = None
    """Over prompt and output (1)."""
    presence_penalty: float | None = None
    """Over the output (0)."""
    frequency_penalty: float | None = None
    """Over the output, per occurrence (0)."""
    prompt_ignore_length: int | None = None
    """The first tokens of the prompt that the repetition penalty doesn't see (0)."""
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these ids."""
    embedding_bias: Any = None
    """float32 [vocab], added to the logits."""
    logits_processor: Any = None
    """A callable or a list of them, called in order at each position; only for an engine in this process."""
    apply_batched_logits_processor: bool = False

    # What comes back
    logprobs: int | None = None
    """0: of each output token; K: of the K likeliest at its position too."""
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobMode = LogprobMode.RAW
    logprobs_simple_format: bool = False
    """A list of floats, of the chosen tokens, instead of dicts by token id."""
    prompt_logprobs_simple_format: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None
    return_routed_experts: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, after which its end marker follows; the LLM needs a `reasoning_parser`."""
    lookahead_config: Any = None

    # Text
    detokenize: bool = True
    add_special_tokens: bool = True
    """The tokenizer adds its BOS (and what else it adds) to a text prompt."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last tokens of the prompt."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Has no effect: the text is what the tokenizer's decoder gives."""

    def __post_init__(self) -> None:
        self.validate()

    @property
    def num_sequences(self) -> int:
        """Sequences to generate: `best_of`, else `n`."""
        return self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        values = (self.temperature, self.top_p, self.top_k, self.min_p)
        if all(value is None for value in values):
            return True
        cold = self.temperature is not None and self.temperature < GREEDY_TEMPERATURE
        return cold or self.top_p == 0 or self.top_k == 1 or self.min_p == 1

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def bad_strings(self) -> list[str]:
        return [self.bad] if isinstance(self.bad, str) else list(self.bad or ())

    def validate(self) -> None:
        """Check every range again; fields may have been assigned since construction."""
        for name, low, high in _INT_RANGES:
            _check_int(name, getattr(self, name), low, high)
        for name, low, high in _FLOAT_RANGES:
            _check_float(name, getattr(self, name), low, high)
        _check_int("n", self.n, 1, MAX_INT, optional=False)
        if self.best_of is not None and self.best_of < self.n:
            raise FieldError("best_of", f"must be at least n ({self.n}), got {self.best_of}")
        if self.repetition_penalty == 0:
            raise FieldError("repetition_penalty", "must be greater than 0, got 0")
        if self.early_stopping not in (None, 0, 1, 2, "never"):
            raise FieldError("early_stopping", f"must be 0, 1, 2 or 'never', got {self.early_stopping!r}")
        try:
            self.logprobs_mode = LogprobMode(_lower(self.logprobs_mode))
        except ValueError:
            raise FieldError("logprobs_mode", f"must be 'raw' or 'processed', got {self.logprobs_mode!r}") from None
        for name in ("stop", "bad"):
            _check_strings(name, getattr(self, name))
        for name in ("stop_token_ids", "bad_token_ids"):
            _check_ids(name, getattr(self, name))
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, 0, None, optional=False)
            _check_float("logit_bias", bias, None, None)

    def require_built(self) -> None:
        """Refuse what this version can't do.

        Raises:
            NotImplementedError: naming the field.
        """
        for name, default in _UNBUILT.items():
            if getattr(self, name) not in (None, default):
                raise NotImplementedError(f"SamplingParams.{name} is not built yet: leave it at {default}")


MAX_FLOAT = 3e38
"""What float32 holds: the device computes with it."""
MAX_INT = 2**31 - 1
"""Of counts and ids: what every array and message between here and the device has room for."""

_INT_RANGES: tuple[tuple[str, int | None, int | None], ...] = (
    ("end_id", -1, MAX_INT),
    ("max_tokens", 0, MAX_INT),
    ("min_tokens", 0, MAX_INT),
    ("best_of", 1, MAX_INT),
    ("top_k", -1, MAX_INT),
    ("seed", None, None),
    ("prompt_ignore_length", 0, MAX_INT),
    ("no_repeat_ngram_size", 0, MAX_INT),
    ("logprobs", 0, MAX_INT),
    ("prompt_logprobs", 0, MAX_INT),
    ("truncate_prompt_tokens", 1, MAX_INT),
    ("thinking_token_budget", 0, MAX_INT),
)
_FLOAT_RANGES: tuple[tuple[str, float | None, float | None], ...] = (
    ("temperature", 0, None),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, None),
    ("presence_penalty", None, None),
    ("frequency_penalty", None, None),
    ("length_penalty", -10, 10),
    ("beam_search_diversity_rate", None, None),
)
_UNBUILT: dict[str, Any] = {
    "beam_width_array": None,
    "top_p_min": 1e-6,
    "top_p_reset_ids": -1,
    "top_p_decay": 1.0,
    "apply_batched_logits_processor": False,
    "return_context_logits": False,
    "exclude_input_from_output": True,
    "return_encoder_output": False,
    "additional_model_outputs": None,
    "return_routed_experts": False,
    "lookahead_config": None,
}


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) and not isinstance(value, enum.Enum) else value


def _check_int(name: str, value: Any, low: int | None, high: int | None, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise FieldError(name, f"must be an integer, got {_shown(value)}")
    _check_range(name, value, low, high)


def _check_float(name: str, value: Any, low: float | None, high: float | None) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not -MAX_FLOAT <= value <= MAX_FLOAT:
        raise FieldError(name, f"must be a number that float32 can hold, got {_shown(value)}")
    _check_range(name, value, low, high)


def _check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    if high not in (None, MAX_INT) and low is not None and not low <= value <= high:
        raise FieldError(name, f"must be from {low} to {high}, got {_shown(value)}")
    if low is not None and value < low:
        raise FieldError(name, f"must be at least {low}, got {_shown(value)}")
    if high is not None and value > high:
        raise FieldError(name, f"must be at most {high}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """For a message of one line; Python refuses to print the largest integers."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_strings(name: str, value: Any) -> None:
    for text in [value] if isinstance(value, str) else _items(name, value):
        if not isinstance(text, str) or not text:
            raise FieldError(name, f"must be a non-empty string or a list of them, got {_shown(text)}")


def _check_ids(name: str, value: Any) -> None:
    for token_id in _items(name, value):
        _check_int(name, token_id, 0, None, optional=False)


def _items(name: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise FieldError(name, f"must be a list, got {_shown(value)}")
    return value  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True, kw_only=True)
class SchedulingParams:
    """Wishes about where a request runs."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool = True
    agent_hierarchy: list[tuple[str, int]] | None = None


@dataclass(frozen=True)
class ConversationParams:
    """Requests of one conversation may be kept together."""

    conversation_id: str

    def __post_init__(self) -> None:
        if not self.conversation_id:
            raise FieldError("conversation_id", "must not be empty")


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for one request."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: Literal["hf", "nemo"] = "hf"

    def __post_init__(self) -> None:
        _check_int("lora_int_id", self.lora_int_id, 0, None, optional=False)


class ScheduleStyle(enum.IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@dataclass(kw_only=True)
class DisaggregatedParams:
    """One half of a request that is split between context and generation servers."""

    request_type: Literal["context_only", "generation_only", "context_and_generation"] | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: Any = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: ScheduleStyle | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None
