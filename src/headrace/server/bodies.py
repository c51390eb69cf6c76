"""Request bodies of the OpenAI routes: which fields there are, their types, and which of them wait to be built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from headrace.front.errors import RequestError
from headrace.server.body_limits import fail_at_first, require_moderate

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "GenerationBody",
    "PinBody",
    "ProfileBody",
    "StreamOptions",
    "UnpinBody",
    "as_body",
    "as_chat",
    "joined",
    "parse_body",
]

# A field that is null means the same as one that is absent, so everything may be None.
# Strict: "5" is no number. Integers are valid floats.


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ConversationBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    conversation_id: str | None = None


class Body(BaseModel):
    """Any of them. What it has no field for is looked up in these."""

    model_config = ConfigDict(strict=True, extra="allow")

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of later work, with the values that mean the same as leaving them out."""
    INERT: ClassVar[frozenset[str]] = frozenset()
    """Known to clients and without any effect on the answer."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        return fail_at_first(handler(source))


AnyBody = TypeVar("AnyBody", bound=Body)


class GenerationBody(Body):
    """What chat and completions share."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )
    """Known to clients and without any effect on the answer."""

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lora_request": (),
        "disaggregated_params": (),
        "return_context_logits": (False,),
        "top_p_min": (0, 0.0),
    }
    """Fields of later work, with the values that mean the same as leaving them out."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = None
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | int | str | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    guided_decoding: dict[str, Any] | None = None
    """TensorRT-LLM's GuidedDecodingParams."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; then its end marker follows, and the answer."""
    priority: float | None = None
    timeout: float | None = None
    """Ours: seconds from arrival to the last token; then it ends with finish_reason "timeout"."""
    cache_salt: str | None = None
    kv_cache_retention_config: dict[str, Any] | None = None
    """Ours: how long the request's blocks should stay."""
    conversation_params: ConversationBody | None = None
    return_token_ids: bool | None = None
    return_timing: bool | None = None
    """Ours: `usage.timing` with the milliseconds in the queue, in the prompt and in the output."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ThinkingBody(BaseModel):
    """Whether the model reasons, as some APIs have it."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["enabled", "disabled"] | None = None
    effort: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.UNBUILT,
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "documents": (),
        "prompt_token_ids": (),
        "prompt_token_ids_b64": (),
        "media_io_kwargs": (),
        "mm_processor_kwargs": (),
        "agent_hierarchy": (),
        "echo": (False,),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    """Where the server takes one."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """For the template; `none` is no reasoning at all."""
    thinking: ThinkingBody | None = None
    stop_in_reasoning: bool | None = None
    """Ours: stop strings end the reasoning, too, and not only the answer."""


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationBody.UNBUILT, "suffix": ("",)}

    prompt: Any = None
    """Text, a list of texts, ids, or a list of lists of ids; looked at by `prompts_of`."""
    echo: bool | None = None
    logprobs: int | None = None


class ProfileBody(Body):
    """POST /start_profile."""

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {"output_dir": ()}
    """Where traces go is for who starts the server to say."""

    num_steps: int | None = Field(None, ge=1, le=1000)
    start_step: int | None = Field(None, ge=0)
    activities: list[Literal["CPU", "GPU", "CUDA_PROFILER"]] | None = None


class UnpinBody(Body):
    """POST /kv_cache/unpin."""

    name: str


class PinBody(UnpinBody):
    """POST /kv_cache/pin. Either of `prompt` and `messages`."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


def parse_body(data: bytes, cls: type[AnyBody]) -> tuple[AnyBody, list[str]]:
    """The body, and the names of fields that nobody knows.

    Raises:
        RequestError: not JSON, a wrong type, or a field whose feature is not built; it names the field.
    """
    require_moderate(data)
    try:
        body = cls.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise _as_request_error(error) from None
    return body, unknown_fields(body)


def as_body(values: dict[str, Any], cls: type[AnyBody]) -> tuple[AnyBody, list[str]]:
    """The same for a body that another API's was translated to."""
    try:
        body = cls.model_validate(values)
    except pydantic.ValidationError as error:
        raise _as_request_error(error) from None
    return body, unknown_fields(body)


def as_chat(
    fields: dict[str, Any], unknown: list[str], *, without_effect: frozenset[str]
) -> tuple[ChatBody, list[str]]:
    """The chat that another API's request became, and which of its `unknown` fields the chat API doesn't know either.

    `without_effect` are fields of the chat API that were not passed on. Raises RequestError.
    """
    chat, others = as_body(fields, ChatBody)
    if chat.n not in (None, 1):
        raise RequestError(f"n must be 1: an answer of this API has one choice, got {chat.n}", param="n")
    return chat, [name for name in unknown if name in without_effect or name in others]


def joined(given: dict[str, Any], own: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the chat API as a client of another one `given` them, and what that API's `own` fields mean.

    `names` are those of the API's own, by the chat's. Raises RequestError: a client has said both, differently.
    """
    own = {name: value for name, value in own.items() if value is not None}
    for name, value in own.items():
        if given.get(name) not in (None, value):
            raise RequestError(f"{name} and {names.get(name, name)} differ: send one", param=name)
    return {**{name: value for name, value in given.items() if value is not None}, **own}


def unknown_fields(body: Body) -> list[str]:
    """Raises RequestError for a field whose feature is not built."""
    extra = body.__pydantic_extra__ or {}
    for name, value in extra.items():
        if name in body.UNBUILT and value is not None and value not in body.UNBUILT[name]:
            raise RequestError(f"{name} is not supported yet: leave it out", param=name, code="unsupported_parameter")
    unknown = [name for name in extra if name not in body.UNBUILT and name not in body.INERT]
    if isinstance(body, GenerationBody) and body.stream_options is not None:
        unknown += [f"stream_options.{name}" for name in body.stream_options.__pydantic_extra__ or {}]
        if not body.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
    return unknown


def _as_request_error(error: pydantic.ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    place = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    if not place:
        return RequestError(f"the body is not a JSON object: {first['msg']}", code="invalid_json")
    field = str(place[0])
    if first["type"] == "missing":
        return RequestError(f"{field} is required", param=field, code="missing_required_parameter")
    path = field + "".join(f"[{part}]" if isinstance(part, int) else "" for part in place[1:])
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    problem = first["msg"][:1].lower() + first["msg"][1:]
    return RequestError(f"{path}: {problem}, got {shown}", param=field, code="invalid_type")
