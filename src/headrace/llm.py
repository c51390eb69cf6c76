"""`LLM`: generation in Python, offline or asynchronous, without a server."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from headrace import env, log, wire
from headrace.config.llm_args import LlmArgs
from headrace.config.resolution import resolve
from headrace.front.builder import RequestOptions
from headrace.front.cache import name_of, require_events, require_reuse
from headrace.front.client import Client, Link
from headrace.front.desk import Asked, Desk, options_of
from headrace.front.embedding import embed
from headrace.front.errors import RequestError, RequestFailed, RuntimeFailure
from headrace.front.outputs import CompletionOutput, Logprob
from headrace.front.progress import wait_all
from headrace.front.prompts import PreprocessedInputs, PromptInputs, is_one_prompt, per_prompt, refuse
from headrace.front.request_output import RequestOutput
from headrace.front.text_side import load_text_side
from headrace.front.tracing import open_tracer
from headrace.hub.source import ModelSource, resolve_model
from headrace.params import (
    ConversationParams,
    DisaggregatedParams,
    KvCacheRetentionConfig,
    LoRARequest,
    SamplingParams,
    SchedulingParams,
)
from headrace.server.caps import limits_of
from headrace.text.tokenizer import Tokenizer
from headrace.types import PinInfo

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestError", "RequestFailed", "RequestOutput", "RuntimeFailure"]

NAMED_DEFAULTS: dict[str, Any] = {
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "revision": None,
    "tokenizer_revision": None,
}

OpenRuntime = Callable[[LlmArgs, ModelSource, Callable[[wire.Down], None]], Link]


class LLM:
    """A model, ready to generate.

        with LLM("smollm2") as llm:
            print(llm.generate("The capital of France is").outputs[0].text)

    Keywords are the fields of `LlmArgs`; unknown ones are refused. Usable from several threads.

    Raises:
        ValueError: a bad setting or model, before anything is loaded where possible.
        RuntimeFailure: the engine could not start; the message is the root cause.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in NAMED_DEFAULTS}
        named = {name: value for name, value in given.items() if value != NAMED_DEFAULTS[name]}
        resolved = resolve(arguments={"model": str(model), **named, **kwargs})
        resolved.take_effect()
        self._open(resolved.args, open_default_runtime)

    @classmethod
    def from_args(cls, args: LlmArgs, *, open_runtime: OpenRuntime | None = None) -> LLM:
        """From a resolved configuration; `open_runtime` puts another runtime behind it (a fake, for tests)."""
        llm = cls.__new__(cls)
        llm._open(args, open_runtime or open_default_runtime)
        return llm

    def _open(self, args: LlmArgs, open_runtime: OpenRuntime) -> None:
        """Load engine and tokenizer at the same time."""
        source = resolve_model(args.model, revision=args.revision)
        self._args = args
        self._llm_id = f"{socket.gethostname()}-{os.getpid()}-{int(time.time() * 1000)}"
        tracer = open_tracer(args.otlp_traces_endpoint)
        self._client = Client(partial(open_runtime, args, source), join_logits=_join_logits, tracer=tracer)
        self._close = weakref.finalize(self, self._client.close)  # also at the interpreter's exit
        self._client.start()
        try:
            text = load_text_side(args, source)
            self._info = self._client.wait_ready()
            self._desk = Desk(
                self._client,
                text,
                self._info,
                processors=_LocalProcessors(),
                reasoning=partial(limits_of, args.reasoning_parser, self._info),
                timeout_s=args.request_timeout_s,
            )
        except BaseException as error:
            self.shutdown()
            raise _plain(error) from None

    # ---- generating --------------------------------------------------------------------------

    def generate(
        self,
        inputs: PromptInputs | Sequence[PromptInputs],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | list[LoRARequest] | None = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: KvCacheRetentionConfig | list[KvCacheRetentionConfig | None] | None = None,
        disaggregated_params: DisaggregatedParams | list[DisaggregatedParams] | None = None,
        scheduling_params: SchedulingParams | list[SchedulingParams] | None = None,
        conversation_params: ConversationParams | list[ConversationParams] | None = None,
        cache_salt: str | list[str | None] | None = None,
        priority: float | list[float] = 0.5,
    ) -> RequestOutput | list[RequestOutput]:
        """The finished output of one prompt, or of each prompt of a list, in its order.

        Arguments after `use_tqdm` and `sampling_params` may be lists, one item for each prompt.

        Raises:
            RequestError: bad input in any prompt; then none is answered.
            RequestFailed: the engine could not finish some; `outputs` of the error has all of them.
        """
        refuse(lora_request=lora_request, prompt_adapter_request=prompt_adapter_request,
               disaggregated_params=disaggregated_params, scheduling_params=scheduling_params)  # fmt: skip
        single = is_one_prompt(inputs)
        prompts: list[Any] = [inputs] if single else list(inputs)
        count = len(prompts)
        asked = zip(
            prompts,
            per_prompt("sampling_params", sampling_params, count),
            per_prompt("priority", priority, count),
            per_prompt("cache_salt", cache_salt, count),
            per_prompt("kv_cache_retention_config", kv_cache_retention_config, count),
            per_prompt("conversation_params", conversation_params, count),
        )
        outputs = self._desk.submit(Asked(prompt, params, options_of(*rest)) for prompt, params, *rest in asked)
        wait_all(outputs, show_progress=use_tqdm and not single)
        failed = [output for output in outputs if output.error is not None]
        if failed:
            raise RequestFailed(
                f"{len(failed)} of {count} requests failed; request {failed[0].request_id}: {failed[0].error}",
                outputs=outputs,
            )
        return outputs[0] if single else outputs

    def generate_async(
        self,
        inputs: PromptInputs | PreprocessedInputs,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: ConversationParams | None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        """Submit one prompt. The result is a future (`result()`, `await aresult()`) and an iterator.

        Raises:
            RequestError: bad input.
        """
        refuse(lora_request=lora_request, prompt_adapter_request=prompt_adapter_request,
               disaggregated_params=disaggregated_params, scheduling_params=scheduling_params)  # fmt: skip
        if not is_one_prompt(inputs):
            raise ValueError("generate_async takes one prompt: call it for each")
        options = options_of(priority, cache_salt, kv_cache_retention_config, conversation_params)
        return self._desk.submit([Asked(inputs, sampling_params, options, trace_headers)], streaming=streaming)[0]

    def preprocess(
        self, inputs: PromptInputs, sampling_params: SamplingParams | None = None, disaggregated_params: Any = None
    ) -> PreprocessedInputs:
        """The prompt as ids, for `generate_async`: lets a caller tokenise on threads of its own."""
        refuse(disaggregated_params=disaggregated_params)
        return self._desk.preprocess(inputs, sampling_params)

    def embed(
        self,
        inputs: PromptInputs | Sequence[PromptInputs],
        *,
        pooling: str = "last",
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> Any:
        """float32 [dimensions] of one prompt, or a row for each of a list: the hidden state after the last norm, of
        the last token or the mean of all. Raises as `generate` does."""
        return embed(self._desk, inputs, pooling=pooling, dimensions=dimensions, normalize=normalize)

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation, up to where the assistant begins; `variables` are for the chat template.

        Raises:
            ValueError: no template, or it refuses the messages; its own message.
        """
        return self._desk.chat_ids(messages, variables)

    # ---- looking -----------------------------------------------------------------------------

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Statistics of each step since the last call, if `enable_iter_perf_stats` is on.

        Raises:
            TimeoutError: no answer after `timeout` seconds.
        """
        return self._client.stats(2.0 if timeout is None else timeout)

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """The same, without blocking the event loop."""
        for iteration in await asyncio.to_thread(self.get_stats, timeout):
            yield iteration

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Size of the primary pool of KV blocks."""
        info = self._info
        return {
            "maxNumBlocks": info.kv_num_blocks,
            "tokensPerBlock": info.tokens_per_block,
            "maxNumTokens": info.max_kv_tokens,
        }

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """What happened to blocks of the KV cache since the last call; see `kvcache/events.py` for what is in them.

        Raises:
            ValueError: no events are kept; the message says which setting to change.
            TimeoutError: no answer after `timeout` seconds.
        """
        require_events(self._info)
        return self._client.kv_events(2.0 if timeout is None else timeout)

    async def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """The same, without blocking the event loop."""
        for event in await asyncio.to_thread(self.get_kv_cache_events, timeout):
            yield event

    # ---- keeping prompts ---------------------------------------------------------------------

    def pin(
        self, prompt: PromptInputs | Sequence[dict[str, Any]], *, name: str, cache_salt: str | None = None
    ) -> PinInfo:
        """Compute a prompt now and keep its blocks until `unpin`, whatever else the cache is used for.

        A list of messages is rendered with the chat template, up to where the next message begins. Prompts that begin
        the same, with the same `cache_salt`, find it like any cached prefix. A pin of the same name is replaced.

        Raises:
            RequestError: no reuse in this engine, or bad input.
            RequestFailed: the pins would hold more of the cache than they may; one of the same name stays as it was.
        """
        require_reuse(self._info)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) and "role" in prompt[0]:
            prompt = self._desk.chat_ids(cast("list[dict[str, Any]]", prompt), {}, add_generation_prompt=False)
        options = RequestOptions(cache_salt=name_of(cache_salt, "cache_salt"), pin=name_of(name, "name"))
        params = SamplingParams(max_tokens=1, detokenize=False)
        self._desk.submit([Asked(prompt, params, options)])[0].result()
        found = [pin for pin in self.pins() if pin.name == name]
        if not found:
            raise RequestError(f"the pin {name!r} was given up at once by somebody else", param="name")
        return found[0]

    def unpin(self, name: str, *, timeout: float = 10) -> bool:
        """Leave a pinned prompt to the cache's usual order; False: there is no such pin."""
        return self._client.unpin(name, timeout)

    def pins(self, *, timeout: float = 10) -> list[PinInfo]:
        """The pinned prompts, in the order they were pinned."""
        return self._client.pins(timeout)

    def start_profile(
        self, *, num_steps: int = 0, start_step: int = 0, activities: Sequence[str] = (), timeout: float = 60
    ) -> list[str]:
        """Trace the engine into `profile_dir`; 0 steps: until `stop_profile`. activities: CPU, GPU. -> its file"""
        wanted = wire.Profile(start=True, num_steps=num_steps, start_step=start_step, activities=[*activities])
        return self._client.profile(wanted, timeout)

    def stop_profile(self, *, timeout: float = 60) -> list[str]:
        """End the trace; returns when it is written. -> its file"""
        return self._client.profile(wire.Profile(start=False), timeout)

    # ---- facts -------------------------------------------------------------------------------

    @property
    def max_seq_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._info.max_seq_len

    @property
    def args(self) -> LlmArgs:
        """The resolved configuration, read-only."""
        return self._args

    @property
    def llm_id(self) -> str:
        """Host, process and start time of this object."""
        return self._llm_id

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._desk.text.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._desk.set_tokenizer(tokenizer)

    @property
    def disaggregated_params(self) -> dict[str, Any]:
        return {}

    # ---- the end -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the engine and all requests, in under 5 s; safe to call twice."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM can't be pickled: make one in each process")

    def encode(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("LLM.encode is not built yet (encode-only mode)")

    def get_data_transceiver_state(self) -> bytes:
        raise NotImplementedError("LLM.get_data_transceiver_state is not built yet (KV transfer between servers)")


def open_default_runtime(args: LlmArgs, source: ModelSource, on_message: Callable[[wire.Down], None]) -> Link:
    """On a CPU threads of this process; on a GPU a process of its own, so that Python here can't slow its steps."""
    import torch

    from headrace.runtime.launch import LocalRuntime, RuntimeProcess

    log.setup_if_asked(env.asked_log_level())
    if torch.cuda.is_available():
        from headrace.front.socket_link import SocketLink

        return SocketLink(RuntimeProcess(args, source, log_level=log.level_here()), on_message)
    return LocalRuntime(args, source, on_message)


class _LocalProcessors:
    """The registry of this process, where the engine is."""

    def register(self, params: SamplingParams) -> int:
        given = params.logits_processor
        if given is None:
            return 0
        from headrace.sampling.processors import register

        return register(given if isinstance(given, list) else [given])

    def release(self, key: int) -> None:
        if key:
            from headrace.sampling.processors import release

            release(key)


def _join_logits(parts: list[Any]) -> Any:
    """float32 [tokens, vocab] of pieces along the first dimension."""
    import torch

    return torch.cat(parts)


def _plain(error: BaseException) -> BaseException:
    """A start that failed for the user's input is a ValueError, whichever thread or process found it."""
    if isinstance(error, RuntimeFailure) and error.bad_input:
        return ValueError(error.message)
    return error
