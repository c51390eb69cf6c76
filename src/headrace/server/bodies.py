"""Request bodies of the OpenAI routes: which fields there are, their types, and which of them wait to be built."""

from __future__ import annotations

from typing import Any, ClassVar

import pydantic
from pydantic import BaseModel, ConfigDict

from headrace.front.errors import RequestError

__all__ = ["ChatBody", "CompletionBody", "GenerationBody", "PinBody", "StreamOptions", "UnpinBody", "parse_body"]

# A field that is null means the same as one that is absent, so everything may be None.
# Strict: "5" is no number. Integers are valid floats.


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ConversationBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    conversation_id: str | None = None


class GenerationBody(BaseModel):
    """What chat and completions share."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    INERT: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )
    """Known to clients and without any effect on the answer."""

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "guided_decoding": (),
        "lora_request": (),
        "disaggregated_params": (),
        "thinking_token_budget": (),
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
    priority: float | None = None
    cache_salt: str | None = None
    kv_cache_retention_config: dict[str, Any] | None = None
    """Ours: how long the request's blocks should stay."""
    conversation_params: ConversationBody | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationBody.UNBUILT,
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": (),
        "reasoning_effort": (),
        "thinking": (),
        "documents": (),
        "chat_template": (),
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
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationBody.UNBUILT, "suffix": ("",)}

    prompt: Any = None
    """Text, a list of texts, ids, or a list of lists of ids; looked at by `prompts_of`."""
    echo: bool | None = None
    logprobs: int | None = None


class UnpinBody(BaseModel):
    """POST /kv_cache/unpin."""

    model_config = ConfigDict(strict=True, extra="allow")

    UNBUILT: ClassVar[dict[str, tuple[Any, ...]]] = {}
    INERT: ClassVar[frozenset[str]] = frozenset()

    name: str


class PinBody(UnpinBody):
    """POST /kv_cache/pin. Either of `prompt` and `messages`."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


Body = ChatBody | CompletionBody | PinBody | UnpinBody


def parse_body(data: bytes, cls: type[Body]) -> tuple[Any, list[str]]:
    """The body, and the names of fields that nobody knows.

    Raises:
        RequestError: not JSON, a wrong type, or a field whose feature is not built; it names the field.
    """
    try:
        body = cls.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise _as_request_error(error) from None
    extra = body.__pydantic_extra__ or {}
    for name, value in extra.items():
        if name in cls.UNBUILT and value is not None and value not in cls.UNBUILT[name]:
            raise RequestError(f"{name} is not supported yet: leave it out", param=name, code="unsupported_parameter")
    unknown = [name for name in extra if name not in cls.UNBUILT and name not in cls.INERT]
    if isinstance(body, GenerationBody) and body.stream_options is not None:
        unknown += [f"stream_options.{name}" for name in body.stream_options.__pydantic_extra__ or {}]
        if not body.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
    return body, unknown


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
