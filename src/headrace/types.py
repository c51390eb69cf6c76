"""Values that cross room borders: requests on their way down, deltas on their way up.

Everything here is a frozen msgspec struct: it travels as msgpack between processes and as
itself inside one. No torch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""The terminal states of a request. The first reason wins; there is exactly one."""

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: dividing by it would overflow float32 logits."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence samples, every default resolved; validated by whoever builds it.

    Greedy is `temperature == 0`. `top_k == 0` is off, `top_p == 1` is off, `min_p == 0` is off.
    Order: bias, bad words and penalties on raw logits; temperature; min_p; top_k; top_p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """64-bit key of the noise. Unseeded requests get a random one where they are built."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token of prompt and output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated (never of the prompt)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence among the generated tokens (never of the prompt)."""
    prompt_ignore_length: int = 0
    """The first N prompt tokens are left out of the repetition penalty's history."""
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is banned when the rest has just been generated."""
    logprobs: int = -1
    """-1: none; 0: of the chosen token; K: of the top K and the chosen one."""
    prompt_logprobs: int = -1
    processed_logprobs: bool = False
    """Log-probabilities after penalties, temperature and filters instead of the raw ones."""
    return_logits: bool = False
    """Offline only: the float32 logits of each generated position travel up with it."""
    processors: int = 0
    """Key of the caller's logits processors in the engine's process; 0 is none. Never on a socket."""

    @property
    def needs_history(self) -> bool:
        """Whether the engine must know the tokens so far, not only the last one."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.no_repeat_ngram_size > 0
            or any(len(word) > 1 for word in self.bad_words)
            or self.processors != 0
        )


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search over one prompt; planned by the control half after each commit."""

    width: int
    num_return: int
    length_penalty: float = 0.0
    """Scores are cumulative log-probability / length ** length_penalty."""
    early_stopping: int = 1
    """1: stop at `width` finished beams; 0: stop when no beam can improve; 2: never stop early."""
    diversity_rate: float = 0.0


DEFAULT_PRIORITY = 35
"""Of a KV block that nobody gave one, and of one whose time is over; 0 is evicted first, 100 last."""


class RetentionRange(msgspec.Struct, frozen=True, array_like=True):
    """Priority of the blocks that hold these prompt tokens."""

    start: int
    end: int | None
    """None: to the end of the prompt."""
    priority: int
    """0 is evicted first, 100 last."""
    duration_s: float | None = None
    """None: for ever. Afterwards the default priority holds."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long one request's blocks should stay (TensorRT-LLM's KvCacheRetentionConfig)."""

    ranges: tuple[RetentionRange, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_s: float | None = None


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt whose blocks stay in the cache whatever the pressure."""

    name: str
    num_tokens: int
    """Leading tokens of the prompt that are kept."""
    num_blocks: int
    """Held, over all layer groups."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """One media item in the prompt: its tokens mean nothing without it."""

    start: int
    length: int
    digest: bytes
    """128 bits or more over the decoded content and the processor's options."""


Marker = tuple[tuple[int, ...], ...]
"""A text in the output as token ids: at each place those that may stand there, the usual one first. A tokenizer may
join the ends of the text with what is around it; the alternatives are the tokens that do."""


class ThinkingCap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit on the reasoning: behind its last token the end marker is all that can come."""

    max_tokens: int
    """Of reasoning, markers left out."""
    ends: tuple[Marker, ...]
    """What ends the reasoning. The first one is what comes at the limit, in its usual spelling."""
    begin: Marker = ()
    """What begins it in the output; () is nothing."""
    is_open: bool = False
    """The output begins inside of it."""
    is_anywhere: bool = False
    """`begin` counts wherever it stands; otherwise at the start of an answer only."""
    blank_ids: tuple[int, ...] = ()
    """White space, which may stand before `begin`."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must match, from its first token or from where the model has ended its reasoning."""

    kind: Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]
    spec: str = ""
    """JSON of the schema, of the list of choices or of the structural tag's `format`; the expression; the grammar."""
    starts_after: Marker = ()
    """What ends the reasoning; it and what comes before are free. () is at once."""
    param: str = "guided_decoding"
    """The caller's field that it came from, for errors."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence (or one beam search) to generate, validated and tokenised.

    `n` and `best_of` have been expanded by the front end: each choice is a request of its own
    with a seed derived from the caller's seed and its index.
    """

    id: int
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, EOS included; empty when EOS is to be ignored."""
    priority: float = 0.5
    """0 to 1, larger runs first; used by the `priority` waiting queue only."""
    arrival_s: float = 0.0
    """time.monotonic() at acceptance."""
    timeout_s: float | None = None
    """From arrival to the last token; past it the request ends with reason `timeout`."""
    cache_salt: str = ""
    """Only requests of the same salt share blocks."""
    adapter: int = 0
    """Load id of the LoRA adapter, never used twice; 0 is the base model."""
    media: tuple[MediaSpan, ...] = ()
    """In the order of their positions, not overlapping."""
    conversation: str = ""
    """Whose turns may share blocks under the `per_conversation` reuse policy."""
    retention: Retention | None = None
    pin: str = ""
    """Keep the prompt's blocks under this name until `unpin`, whatever the pressure."""
    beam: BeamSearch | None = None
    grammar: Grammar | None = None
    thinking: ThinkingCap | None = None
    pooling: Literal["", "last", "mean"] = ""
    """Instead of tokens: the hidden state of the prompt's last token, or the mean of all of them. The request ends
    there; it finds nothing in the cache and leaves nothing there."""
    label: str = ""
    """The id the user sees, for the log line of the terminal state."""


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: the chosen token first, then the top K in rank order."""

    ids: list[int]
    values: list[float]
    ranks: list[int]


class RequestTimes(msgspec.Struct, frozen=True):
    """Seconds of time.monotonic(); 0.0 where the event has not happened."""

    arrival_s: float = 0.0
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one commit adds to one request."""

    id: int
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    """One per token, when asked for."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """All prompt positions at once (the first is None), with the first token."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The stop id that ended the sequence; it is the last of `tokens`."""
    error: str = ""
    param: str = ""
    """The caller's field that the error is about; "" when the caller is not at fault."""
    cached_tokens: int = 0
    times: RequestTimes | None = None
    """With the first token, and with the terminal delta."""
    beams: list[Beam] | None = None
    """With the terminal delta of a beam search, best first."""
    logits: Any = None
    """Offline only: what `Sampling.return_logits` asked for, a tensor [tokens, vocab]."""
    embedding: bytes = b""
    """float32 [hidden], with the terminal delta of a request with `pooling`."""


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """One finished hypothesis."""

    tokens: list[int]
    score: float
    cumulative_logprob: float
    finish: FinishReason
    stop_token: int | None = None
    logprobs: list[Logprobs] = []
