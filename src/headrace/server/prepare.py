"""From the bytes of a body to requests for the runtime, on a worker thread and not on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

from headrace import wire
from headrace.front.builder import RequestBuilder, RequestOptions, RouteDefaults
from headrace.front.cache import as_retention_config, name_of, require_reuse
from headrace.front.collector import Collector, NewText
from headrace.front.errors import RequestError
from headrace.params import SamplingParams
from headrace.server.answer import Answer, Api, Shown, UsageShown
from headrace.server.bodies import ChatBody, CompletionBody, GenerationBody, PinBody, parse_body
from headrace.server.chat_route import CHAT
from headrace.server.completion_route import COMPLETION
from headrace.server.errors import model_not_found
from headrace.server.guided import guided_of
from headrace.server.messages import check_roles, has_calls, plain_messages
from headrace.server.params import chat_params, completion_params
from headrace.server.parsing import Parsing
from headrace.server.reasoning import variables_of
from headrace.server.rules import RequestRules
from headrace.server.tenancy import SESSION_HEADER, Caller, salt_of
from headrace.server.thinking import budget_of
from headrace.server.tools import ToolUse, tool_use_of
from headrace.text.given_template import MAX_GIVEN_BYTES, GivenTemplate
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types import Request, ThinkingCap

__all__ = ["Kitchen", "Prepared", "Rendered", "prompts_of"]

COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions without max_tokens; a chat may go on to the end of the context."""
HTTP_UNSET = {"temperature": 1.0, "top_p": 1.0}
"""What the API's defaults are, where neither the request nor the model's generation config says anything."""
MAX_PROMPTS = 4096
MAX_COUNTED_TOKENS = 1 << 18
"""Of a text that is only tokenised; a larger context allows more."""
MAX_SEQUENCES = 4096
"""Of one request: prompts times choices."""


class Rendered(NamedTuple):
    """A chat as the model reads it."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Prepared:
    """A request that has passed every check of this side."""

    answer: Answer
    collectors: list[Collector]
    requests: list[Request]
    unknown: list[str]
    """Names of body fields that nobody knows."""

    @cached_property
    def frame(self) -> bytes:
        """What the runtime is sent. Of a long prompt it takes a while, so it is made where the rest was prepared."""
        return wire.encode(wire.Submit(self.requests))


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    """All that preparing needs; frozen once the model is there."""

    model_name: str
    tokenizer: Tokenizer | None
    """None: ids in, ids out."""
    template: ChatTemplate | None
    builder: RequestBuilder
    allocate: Callable[[int], Sequence[int]]
    stream_interval: int = 1
    timeout_s: float | None = None
    salt_from_api_key: bool = False
    parsing: Parsing = field(default_factory=Parsing)
    pooling: Literal["last", "mean"] = "last"
    """Of embeddings, where the request names none."""
    rules: RequestRules = field(default_factory=RequestRules)

    def chat(self, data: bytes, caller: Caller) -> Prepared:
        """Raises RequestError or NotImplementedError, naming the field."""
        body, unknown = parse_body(data, ChatBody)
        return self.chat_of(body, unknown, caller)

    def chat_of(self, body: ChatBody, unknown: list[str], caller: Caller, *, api: Api = CHAT) -> Prepared:
        """A chat, also of another API whose body became this one."""
        answer = self._answer(body, api, caller, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        params = chat_params(body)
        use = answer.tool_use = tool_use_of(body)
        rendered = self.rendered(body)
        parsed = self.parsing.chat(
            rendered.text, use, params, variables=variables_of(body), stops_thinking=bool(body.stop_in_reasoning)
        )
        answer.has_parser = parsed.new_text is not None
        params.guided_decoding = parsed.guided
        options = replace(
            self._options(answer, body, caller),
            grammar_starts_after=parsed.starts_after,
            thinking=self._cap(body, rendered.text, use),
        )
        if parsed.guided_by_tools:
            options = replace(options, grammar_param="tools")
        return self._prepared(answer, params, [rendered.ids], options, unknown, new_text=parsed.new_text)

    def rendered(self, body: ChatBody, *, most: int | None = None) -> Rendered:
        """The prompt that the template makes of a chat, of `most` tokens or what the context holds.

        Raises RequestError.
        """
        wants_answer = body.add_generation_prompt is not False
        return self._chat_prompt(body.messages, body, add_generation_prompt=wants_answer, most=most)

    @property
    def most_counted(self) -> int:
        """Tokens that a text may have where nothing is generated."""
        return max(MAX_COUNTED_TOKENS, self.builder.info.max_seq_len)

    def time_limit_s(self, wanted_s: float | None) -> float | None:
        """The server's or the client's, whichever is up first."""
        return min((limit for limit in (self.timeout_s, wanted_s) if limit is not None), default=None)

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404): it isn't the one that is served."""
        if name is not None and name != self.model_name:
            raise model_not_found(name, self.model_name)

    def completion(self, data: bytes, caller: Caller) -> Prepared:
        """Raises RequestError or NotImplementedError, naming the field."""
        body, unknown = parse_body(data, CompletionBody)
        answer = self._answer(body, COMPLETION, caller, logprobs=body.logprobs)
        params = completion_params(body)
        prompts = prompts_of(body.prompt)
        if len(prompts) * params.num_sequences > MAX_SEQUENCES:
            raise RequestError(
                f"{len(prompts)} prompts with {params.num_sequences} choices each are more than"
                f" {MAX_SEQUENCES} sequences: send fewer in one request",
                param="prompt",
            )
        ids = [self.builder.encode(p, params) if isinstance(p, str) else p for p in prompts]
        is_capped = body.thinking_token_budget is not None
        caps = [self._cap(body, self._as_text(p)) for p in prompts] if is_capped else []
        if body.echo:
            echo = [
                p if isinstance(p, str) and params.truncate_prompt_tokens is None else self._shown(i, params)
                for p, i in zip(prompts, ids)
            ]
            answer.shown = replace(answer.shown, echo=echo)
        options = self._options(answer, body, caller, default_max_tokens=COMPLETION_MAX_TOKENS)
        return self._prepared(answer, params, ids, options, unknown, caps=caps)

    def pin(self, data: bytes, caller: Caller) -> Prepared:
        """A prompt to be computed and kept. Raises RequestError, naming the field."""
        body, unknown = parse_body(data, PinBody)
        require_reuse(self.builder.info)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("a pin is of a prompt or of messages: send one of them", param="prompt")
        params = SamplingParams(max_tokens=1, detokenize=False)
        if body.messages is not None:
            prompt, param = self._chat_prompt(body.messages, body, add_generation_prompt=False).ids, "messages"
        else:
            prompt, param = body.prompt, "prompt"
            if isinstance(prompt, str):
                params.add_special_tokens = body.add_special_tokens is not False
                prompt = self.builder.encode(prompt, params)
        assert isinstance(prompt, list)
        options = RequestOptions(
            cache_salt=salt_of(caller, body.cache_salt, from_api_key=self.salt_from_api_key),
            timeout_s=self.timeout_s,
            arrival_s=caller.arrived_s,
            param=param,
            pin=name_of(body.name, "name"),
        )
        answer = Answer(api=COMPLETION, model=self.model_name, failure_status=409)
        return self._prepared(answer, params, [prompt], options, unknown)

    def _as_text(self, prompt: str | list[int]) -> str:
        """A prompt with all its marks; '' where there is no tokenizer."""
        if isinstance(prompt, str) or self.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        size = self.builder.info.num_valid_ids  # others are refused later
        return self.tokenizer.decode([i for i in prompt if 0 <= i < size], skip_special_tokens=False)

    def _cap(self, body: GenerationBody, prompt: str, use: ToolUse | None = None) -> ThinkingCap | None:
        """The limit on the reasoning. `use` is a chat's. Raises RequestError."""
        budget = budget_of(body, self.rules.thinking_budgets)
        if budget is None or not (budget.is_asked_for or self.parsing.thinking):
            return None
        variables = variables_of(body) if isinstance(body, ChatBody) else {}
        return self.parsing.cap(budget, prompt, use, variables=variables)

    def _shown(self, ids: list[int], params: SamplingParams) -> str:
        if self.tokenizer is None:
            raise RequestError("echo needs a tokenizer and this engine has none", param="echo")
        return self.tokenizer.decode(
            ids[-(params.truncate_prompt_tokens or 0) :], skip_special_tokens=params.skip_special_tokens
        )

    def _answer(self, body: GenerationBody, api: Api, caller: Caller, *, logprobs: int | None) -> Answer:
        self.check_model(body.model)
        if self.tokenizer is None and (logprobs is not None or body.prompt_logprobs is not None):
            raise RequestError("log-probabilities need a tokenizer and this engine has none", param="logprobs")
        options = body.stream_options
        return Answer(
            api=api,
            model=self.model_name,
            client_id=caller.request_id,
            n=body.n or 1,
            tokenizer=self.tokenizer,
            stream=bool(body.stream),
            stream_interval=self.stream_interval,
            shown=Shown(
                ids=bool(body.return_token_ids) or self.tokenizer is None,
                logprobs=logprobs,
                prompt_logprobs=body.prompt_logprobs is not None,
            ),
            usage=UsageShown(
                at_end=bool(options and options.include_usage) or bool(body.return_timing),
                in_pieces=bool(options and options.continuous_usage_stats),
                timing=bool(body.return_timing),
            ),
        )

    def _chat_prompt(
        self,
        messages: list[dict[str, Any]],
        body: ChatBody | PinBody,
        *,
        add_generation_prompt: bool,
        most: int | None = None,
    ) -> Rendered:
        template = self.template
        if template is None or self.tokenizer is None:
            raise RequestError("a chat needs a tokenizer and this engine has none: send ids to /v1/completions",
                               param="messages")  # fmt: skip
        variables = variables_of(body)
        if body.chat_template is not None:
            template = self._given_template(body.chat_template, template)
        try:
            text = template.render(
                plain_messages(messages, arguments_as_text=has_calls(messages) and template.arguments_as_text),
                tools=tool_use_of(body).shown if isinstance(body, ChatBody) else None,
                add_generation_prompt=add_generation_prompt,
                extra=variables,
            )
            check_roles(messages, template.source)  # behind the template, whose own message says more
            # The template writes BOS itself, so the tokenizer must not.
            params = SamplingParams(add_special_tokens=bool(body.add_special_tokens))
            if isinstance(body, ChatBody):
                params.truncate_prompt_tokens = body.truncate_prompt_tokens
            return Rendered(text, self.builder.encode(text, params, param="messages", most=most))
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(str(error), param="messages", code="chat_template_error") from None

    def _given_template(self, source: str, own: ChatTemplate) -> GivenTemplate:
        """A request's template in place of the model's `own`. Raises RequestError."""
        if not self.rules.takes_templates:
            raise RequestError(
                "chat_template: this server takes no templates from requests: leave it out, or start the server with"
                " --allow_request_chat_template",
                param="chat_template",
                code="unsupported_parameter",
            )
        if len(source.encode(errors="replace")) > MAX_GIVEN_BYTES:
            raise RequestError(f"chat_template has more than {MAX_GIVEN_BYTES} bytes: shorten it",
                               param="chat_template")  # fmt: skip
        return GivenTemplate(source, special_tokens=own.special_tokens)

    def _options(
        self, answer: Answer, body: GenerationBody, caller: Caller, *, default_max_tokens: int | None = None
    ) -> RequestOptions:
        conversation, param = caller.session_id, SESSION_HEADER
        if body.conversation_params is not None:
            conversation, param = body.conversation_params.conversation_id, "conversation_params"
        return RequestOptions(
            priority=0.5 if body.priority is None else body.priority,
            cache_salt=salt_of(caller, body.cache_salt, from_api_key=self.salt_from_api_key),
            conversation=name_of(conversation, param),
            retention=as_retention_config(body.kv_cache_retention_config),
            grammar_param=guided_of(body).param,
            timeout_s=self.time_limit_s(body.timeout),
            arrival_s=caller.arrived_s,
            defaults=RouteDefaults(
                unset=HTTP_UNSET, max_tokens=default_max_tokens, clamps_max_tokens=self.rules.clamps_max_tokens
            ),
            param=answer.api.prompt,
        )

    def _prepared(
        self,
        answer: Answer,
        params: SamplingParams,
        prompts: list[list[int]],
        options: RequestOptions,
        unknown: list[str],
        *,
        new_text: NewText | None = None,
        caps: Sequence[ThinkingCap | None] = (),
    ) -> Prepared:
        """`caps`: by prompt, where they differ."""
        if answer.stream and answer.shown.prompt_logprobs:
            raise RequestError("prompt_logprobs is not available with stream: true", param="prompt_logprobs")
        collectors: list[Collector] = []
        together: list[Request] = []
        for index, ids in enumerate(prompts):
            own = replace(options, label=answer.label if len(prompts) == 1 else f"{answer.label}/{index}")
            own = replace(own, thinking=caps[index]) if caps else own
            requests, resolved = self.builder.build(ids, params, allocate=self.allocate, options=own)
            collectors.append(
                Collector(requests, resolved, tokenizer=self.tokenizer, streaming=answer.stream, new_text=new_text)
            )
            together += requests
        return Prepared(answer, collectors, together, unknown)


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion body: text, a list of texts, ids, or a list of lists of ids.

    Raises:
        RequestError: anything else.
    """
    if prompt is None:
        raise RequestError("prompt is required", param="prompt", code="missing_required_parameter")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        items = cast("list[Any]", prompt)
        if not items:
            raise RequestError("empty prompt: give text, or at least one token id", param="prompt")
        if len(items) > MAX_PROMPTS and not _are_ids(items):
            raise RequestError(f"prompt has {len(items)} prompts; at most {MAX_PROMPTS} are taken", param="prompt")
        if all(isinstance(item, str) for item in items):
            return items
        if _are_ids(items):
            return [items]
        if all(isinstance(item, list) and _are_ids(cast("list[Any]", item)) for item in items):
            return items
    raise RequestError(
        "prompt must be text, a list of texts, a list of token ids, or a list of lists of token ids", param="prompt"
    )


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
