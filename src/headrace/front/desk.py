"""Where prompts are taken: each becomes requests of the runtime, and they are sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from headrace import wire
from headrace.front.builder import RequestBuilder, RequestOptions
from headrace.front.cache import as_retention_config, name_of
from headrace.front.client import Client
from headrace.front.collector import Collector
from headrace.front.errors import RequestError
from headrace.front.prompts import PreprocessedInputs, split
from headrace.front.request_output import RequestOutput
from headrace.front.text_side import TextSide
from headrace.front.tracing import NO_TRACE, Trace
from headrace.params import ConversationParams, KvCacheRetentionConfig, SamplingParams
from headrace.text.load import as_tokenizer
from headrace.types import Request, ThinkingCap

__all__ = ["Asked", "Desk", "LimitReasoning", "Processors", "options_of"]

SUBMIT_GROUP = 64
"""Prompts that are sent together: the engine begins while the next ones are tokenised."""

LimitReasoning = Callable[[int, list[int]], ThinkingCap]
"""A budget of tokens and a prompt's ids -> what the engine is told. The ids are valid ones."""

_Prepared = tuple[list[Request], SamplingParams, str | None]


class Asked(NamedTuple):
    """One prompt of a caller, in any form."""

    prompt: Any
    params: SamplingParams | None
    options: RequestOptions
    trace_headers: Mapping[str, str] | None = None
    """What names the caller's trace; without it the trace is the one that the caller is in."""


class _Named(NamedTuple):
    """Implements `tracing.Told`."""

    operation: str
    model: str
    id: str
    n: int
    stream: bool


class _Ended(NamedTuple):
    """Implements `tracing.Ended`."""

    answer: _Named
    collectors: list[Collector]


class Processors(Protocol):
    """Where the engine finds a caller's logits processors by key."""

    def register(self, params: SamplingParams) -> int:
        """0 when there are none."""
        ...

    def release(self, key: int) -> None: ...


class Desk:
    """Shared by threads, but for `set_tokenizer`."""

    def __init__(
        self,
        client: Client,
        text: TextSide,
        info: wire.ModelInfo,
        *,
        processors: Processors,
        reasoning: Callable[[TextSide], LimitReasoning | None] = lambda text: None,
        timeout_s: float | None = None,
    ) -> None:
        """`reasoning` tells how this model marks its reasoning, if anybody knows."""
        self.text = text
        self._client = client
        self._info = info
        self._processors = processors
        self._timeout_s = timeout_s
        self._reasoning = reasoning
        self._builder: RequestBuilder = text.builder(info)
        self._limit = reasoning(text)

    @property
    def hidden_size(self) -> int:
        """Of embeddings; 0: the engine gives none."""
        return self._info.hidden_size

    def set_tokenizer(self, tokenizer: Any) -> None:
        self.text = dataclasses.replace(self.text, tokenizer=as_tokenizer(tokenizer))
        self._builder = self.text.builder(self._info)
        self._limit = self._reasoning(self.text)

    def preprocess(self, prompt: Any, params: SamplingParams | None) -> PreprocessedInputs:
        """Raises RequestError or ValueError for what is no prompt."""
        text, ids = split(prompt)
        return PreprocessedInputs(self._ids(text, ids, params or SamplingParams()), text, params)

    def chat_ids(
        self, messages: Sequence[dict[str, Any]], variables: dict[str, Any], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Raises ValueError: no template, or it refuses the messages."""
        if self.text.template is None or self.text.tokenizer is None:
            raise ValueError("a chat needs a tokenizer: leave skip_tokenizer_init off")
        text = self.text.template.render(messages, add_generation_prompt=add_generation_prompt, extra=variables)
        return self.text.tokenizer.encode(text, add_special_tokens=False)  # the template writes BOS itself

    def submit(self, asked: Iterable[Asked], *, streaming: bool = False) -> list[RequestOutput]:
        """All of them or none: at the first bad one those that were sent are aborted."""
        outputs: list[RequestOutput] = []
        group: list[tuple[_Prepared, Trace]] = []
        try:
            for one in asked:
                trace = self._client.tracer.begin(one.trace_headers or {})
                group.append((self._prepare(one), trace))
                if len(group) == SUBMIT_GROUP:
                    outputs += self._send(group, streaming=streaming)
                    group = []
            return outputs + (self._send(group, streaming=streaming) if group else [])
        except BaseException:
            for output in outputs:
                output.abort()
            raise

    def _ids(self, text: str | None, ids: list[int] | None, params: SamplingParams) -> list[int]:
        if ids is not None:
            return ids
        assert text is not None
        return self._builder.encode(text, params)

    def _prepare(self, asked: Asked) -> _Prepared:
        prompt, params, options, _ = asked
        if isinstance(prompt, PreprocessedInputs) and params is None:
            params = prompt.sampling_params
        params = params or SamplingParams()
        text, ids = split(prompt)
        ids = self._ids(text, ids, params)
        budget = params.thinking_token_budget
        if budget is not None and self._limit is not None:
            options = dataclasses.replace(options, thinking=self._limit(budget, ids))
        key = self._processors.register(params)
        options = dataclasses.replace(options, timeout_s=self._timeout_s, processors=key)
        try:
            requests, resolved = self._builder.build(
                ids, params, allocate=self._client.router.allocate, options=options
            )
        except BaseException:
            self._processors.release(key)
            raise
        return requests, resolved, text

    def _send(self, group: list[tuple[_Prepared, Trace]], *, streaming: bool) -> list[RequestOutput]:
        prepared = [one for one, _ in group]
        outputs = self._client.submit_many(prepared, tokenizer=self.text.tokenizer, streaming=streaming)
        for output, ((requests, _, _), trace) in zip(outputs, group):
            key = requests[0].sampling.processors
            if key or trace is not NO_TRACE:
                output.when_done(lambda output, key=key, trace=trace: self._ended(output, key, trace))
        return outputs

    def _ended(self, output: RequestOutput, processors: int, trace: Trace) -> None:
        if processors:
            self._processors.release(processors)
        if trace is NO_TRACE:
            return
        collector = output.collector
        operation = "embeddings" if collector.first.pooling else "text_completion"
        named = _Named(operation, self._info.model, str(output.request_id), collector.params.n, output.streaming)
        failed = RequestError(collector.error, code="request_failed", status=500) if collector.error else None
        trace.end(_Ended(named, [collector]), failed)


def options_of(
    priority: float,
    cache_salt: str | None,
    retention: KvCacheRetentionConfig | None,
    conversation: ConversationParams | None,
) -> RequestOptions:
    """Raises RequestError, naming the argument."""
    if not isinstance(conversation, ConversationParams | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        problem = f"conversation_params must be ConversationParams, got {type(conversation).__name__}"
        raise RequestError(problem, param="conversation_params")
    return RequestOptions(
        priority=priority,
        cache_salt=name_of(cache_salt, "cache_salt"),
        retention=as_retention_config(retention),
        conversation=conversation.conversation_id if conversation else "",
    )
