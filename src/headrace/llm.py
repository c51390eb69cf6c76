"""`LLM`: generation in Python, offline or asynchronous, without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import wire
from headrace.config.llm_args import LlmArgs
from headrace.config.resolution import resolve
from headrace.front.builder import RequestBuilder, RequestOptions
from headrace.front.client import Client, Link
from headrace.front.errors import RequestError, RequestFailed, RuntimeFailure
from headrace.front.outputs import CompletionOutput, Logprob
from headrace.front.progress import wait_all
from headrace.front.prompts import PreprocessedInputs, PromptInputs, is_one_prompt, per_prompt, refuse, split
from headrace.front.request_output import RequestOutput
from headrace.front.text_side import TextSide, as_tokenizer, load_text_side
from headrace.hub.source import ModelSource, resolve_model
from headrace.params import SamplingParams
from headrace.text.tokenizer import Tokenizer
from headrace.types import Request

if TYPE_CHECKING:
    from headrace.params import ConversationParams, DisaggregatedParams, LoRARequest, SchedulingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestError", "RequestFailed", "RequestOutput", "RuntimeFailure"]

SUBMIT_GROUP = 64
"""Prompts of `generate` that are sent together: the engine begins while the next ones are tokenised."""

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
        self._client = Client(lambda on_message: open_runtime(args, source, on_message), join_logits=_join_logits)
        self._close = weakref.finalize(self, self._client.close)  # also at the interpreter's exit
        self._client.start()
        try:
            self._text: TextSide = load_text_side(args, source)
            self._info = self._client.wait_ready()
            self._builder: RequestBuilder = self._text.builder(self._info)
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
        kv_cache_retention_config: Any = None,
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
        refuse(
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            kv_cache_retention_config=kv_cache_retention_config,
            disaggregated_params=disaggregated_params,
            scheduling_params=scheduling_params,
            conversation_params=conversation_params,
        )
        single = is_one_prompt(inputs)
        prompts: list[Any] = [inputs] if single else list(inputs)
        count = len(prompts)
        outputs = self._submit_all(
            prompts,
            per_prompt("sampling_params", sampling_params, count),
            per_prompt("cache_salt", cache_salt, count),
            per_prompt("priority", priority, count),
        )
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
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Any = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: ConversationParams | None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        """Submit one prompt. The result is a future (`result()`, `await aresult()`) and an iterator.

        Raises:
            RequestError: bad input.
        """
        refuse(
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            kv_cache_retention_config=kv_cache_retention_config,
            disaggregated_params=disaggregated_params,
            trace_headers=trace_headers,
            scheduling_params=scheduling_params,
            conversation_params=conversation_params,
        )
        if not is_one_prompt(inputs):
            raise ValueError("generate_async takes one prompt: call it for each")
        prepared = self._prepare(inputs, sampling_params, cache_salt, priority)
        return self._submit([prepared], streaming=streaming)[0]

    def preprocess(
        self, inputs: PromptInputs, sampling_params: SamplingParams | None = None, disaggregated_params: Any = None
    ) -> PreprocessedInputs:
        """The prompt as ids, for `generate_async`: lets a caller tokenise on threads of its own."""
        refuse(disaggregated_params=disaggregated_params)
        params = sampling_params or SamplingParams()
        text, ids = split(inputs)
        return PreprocessedInputs(self._ids(text, ids, params), text, sampling_params)

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation, up to where the assistant begins; `variables` are for the chat template.

        Raises:
            ValueError: no template, or it refuses the messages; its own message.
        """
        if self._text.template is None or self._text.tokenizer is None:
            raise ValueError("a chat needs a tokenizer: leave skip_tokenizer_init off")
        text = self._text.template.render(messages, extra=variables)
        return self._text.tokenizer.encode(text, add_special_tokens=False)  # the template writes BOS itself

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
        return self._text.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._text = dataclasses.replace(self._text, tokenizer=as_tokenizer(tokenizer))
        self._builder = self._text.builder(self._info)

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

    # ---- what is not there yet ---------------------------------------------------------------

    def encode(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("LLM.encode is not built yet (encode-only mode)")

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        raise NotImplementedError("LLM.get_kv_cache_events is not built yet (KV cache events)")

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError("LLM.get_kv_cache_events_async is not built yet (KV cache events)")

    def get_data_transceiver_state(self) -> bytes:
        raise NotImplementedError("LLM.get_data_transceiver_state is not built yet (KV transfer between servers)")

    def start_profile(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("LLM.start_profile is not built yet (profiling)")

    def stop_profile(self) -> None:
        raise NotImplementedError("LLM.stop_profile is not built yet (profiling)")

    # ---- inside ------------------------------------------------------------------------------

    def _ids(self, text: str | None, ids: list[int] | None, params: SamplingParams) -> list[int]:
        if ids is not None:
            return ids
        assert text is not None
        return self._builder.encode(text, params)

    def _prepare(
        self, prompt: Any, params: SamplingParams | None, cache_salt: str | None, priority: float
    ) -> tuple[list[Request], SamplingParams, str | None]:
        if isinstance(prompt, PreprocessedInputs) and params is None:
            params = prompt.sampling_params
        params = params or SamplingParams()
        if cache_salt == "":
            raise RequestError("cache_salt must not be empty: give a text, or leave it out", param="cache_salt")
        text, ids = split(prompt)
        ids = self._ids(text, ids, params)
        options = RequestOptions(
            priority=priority,
            cache_salt=cache_salt or "",
            timeout_s=self._args.request_timeout_s,
            processors=_register_processors(params),
        )
        try:
            requests, resolved = self._builder.build(
                ids, params, allocate=self._client.router.allocate, options=options
            )
        except BaseException:
            _release_processors(options.processors)
            raise
        return requests, resolved, text

    def _submit(
        self, prepared: list[tuple[list[Request], SamplingParams, str | None]], *, streaming: bool = False
    ) -> list[RequestOutput]:
        outputs = self._client.submit_many(prepared, tokenizer=self._text.tokenizer, streaming=streaming)
        for output, (requests, _, _) in zip(outputs, prepared):
            key = requests[0].sampling.processors
            if key:
                output.when_done(lambda _, key=key: _release_processors(key))
        return outputs

    def _submit_all(
        self, prompts: list[Any], params: list[Any], salts: list[Any], priorities: list[Any]
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        group: list[tuple[list[Request], SamplingParams, str | None]] = []
        try:
            for arguments in zip(prompts, params, salts, priorities):
                group.append(self._prepare(*arguments))
                if len(group) == SUBMIT_GROUP:
                    outputs += self._submit(group)
                    group = []
            return outputs + (self._submit(group) if group else [])
        except BaseException:
            for output in outputs:
                output.abort()
            raise


def open_default_runtime(args: LlmArgs, source: ModelSource, on_message: Callable[[wire.Down], None]) -> Link:
    """On a CPU threads of this process; on a GPU a process of its own, so that Python here can't slow its steps."""
    import torch

    from headrace.runtime.launch import LocalRuntime, RuntimeProcess

    if torch.cuda.is_available():
        from headrace.front.socket_link import SocketLink

        return SocketLink(RuntimeProcess(args, source), on_message)
    return LocalRuntime(args, source, on_message)


def _register_processors(params: SamplingParams) -> int:
    given = params.logits_processor
    if given is None:
        return 0
    from headrace.sampling.processors import register

    return register(given if isinstance(given, list) else [given])


def _release_processors(key: int) -> None:
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
