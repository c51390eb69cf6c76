"""`GenerateRequest` and `EmbedRequest` to requests for the runtime, under the limits that HTTP clients have."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from google.protobuf.message import Message

from headrace.front.builder import RequestOptions
from headrace.front.cache import as_retention_config, name_of
from headrace.front.collector import Collector
from headrace.front.errors import RequestError
from headrace.server.answer import Answer, Shown
from headrace.server.bodies import CompletionBody
from headrace.server.embedding_routes import prepare as prepare_embedding
from headrace.server.params import completion_params
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.renamed import renamed
from headrace.server.rpc.writer import api_of
from headrace.server.tenancy import SESSION_HEADER, Caller, salt_of

__all__ = ["MAX_ID_LENGTH", "prepare_embed", "prepare_generate"]

MAX_ID_LENGTH = 256
PROMPT = "tokenized.input_token_ids"

REFUSED = {
    "lora_config": "LoRA adapters",
    "prompt_tuning_config": "prompt tuning",
    "multimodal_input": "multimodal input",
    "lookahead_config": "lookahead decoding",
    "tokenized.query_token_ids": "star attention",
    "sampling_config.top_p_min": "a decay of top_p",
    "sampling_config.top_p_reset_ids": "a decay of top_p",
    "sampling_config.top_p_decay": "a decay of top_p",
    "sampling_config.beam_search_diversity_rate": "diverse beams",
    "sampling_config.beam_width_array": "beams of changing width",
    "output_config.return_context_logits": "logits",
    "output_config.return_generation_logits": "logits",
    "output_config.return_encoder_output": "encoders",
}
"""Fields that may not be set, and what they would need."""

SAMPLING = (
    "top_k", "top_p", "seed", "temperature", "min_tokens", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "prompt_ignore_length", "length_penalty", "early_stopping", "no_repeat_ngram_size", "min_p",
)  # fmt: skip
"""Fields of `SamplingConfig` that go over as they are."""

GUIDES = {1: "json_object", 2: "json", 3: "regex", 4: "grammar", 5: "structural_tag"}
"""By `GuideType`: the field of GuidedDecodingParams."""

FIELDS = {
    "prompt": PROMPT,
    "tokenized": PROMPT,
    "n": "sampling_config.num_return_sequences",
    "best_of": "sampling_config.beam_width",
    "logprobs": "output_config.logprobs",
    "prompt_logprobs": "output_config.prompt_logprobs",
    "logit_bias": "embedding_bias",
    "cache_salt": "cache_salt_id",
    "kv_cache_retention_config": "kv_cache_retention.config_json",
    "include_stop_str_in_output": "include_stop_token_in_output",
    **{name: f"sampling_config.{name}" for name in SAMPLING},
}
"""Names of the HTTP API's fields here, for errors."""


def prepare_generate(kitchen: Kitchen, request: Any, caller: Caller, *, timeout_s: float | None) -> Prepared:
    """`timeout_s` is what the deadline of the call leaves.

    Raises:
        RequestError: naming the field.
        NotImplementedError: a field that this server can't serve.
    """
    _refuse_unbuilt(request)
    output = request.output_config
    with renamed(FIELDS):
        if not request.max_tokens:
            raise RequestError("max_tokens must be at least 1: set it", param="max_tokens")
        body = _body_of(request, kitchen.builder.info.vocab_size)
        params = completion_params(body)
        ids = [int(token) for token in request.tokenized.input_token_ids]
        answer = Answer(
            api=api_of(keeps_stop_token=request.include_stop_token_in_output, has_times=output.return_perf_metrics),
            model=kitchen.model_name,
            client_id=request.request_id,
            n=params.n,
            stream=request.streaming,
            stream_interval=kitchen.stream_interval,
            shown=Shown(ids=True, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs is not None),
        )
        options = RequestOptions(
            cache_salt=salt_of(caller, body.cache_salt, from_api_key=kitchen.salt_from_api_key),
            conversation=name_of(caller.session_id, SESSION_HEADER),
            retention=as_retention_config(body.kv_cache_retention_config),
            grammar_param="guided_decoding",
            timeout_s=kitchen.time_limit_s(timeout_s),
            arrival_s=caller.arrived_s,
            label=answer.label,
            param="prompt",
        )
        requests, resolved = kitchen.builder.build(ids, params, allocate=kitchen.allocate, options=options)
        collector = Collector(requests, resolved, tokenizer=kitchen.tokenizer, streaming=answer.stream)
    prepared = Prepared(answer, [collector], requests, [])
    assert prepared.frame
    return prepared


def prepare_embed(kitchen: Kitchen, request: Any, caller: Caller) -> Prepared:
    """Raises as `prepare_generate` does."""
    ids = [int(token) for token in request.tokenized.input_token_ids]
    with renamed({"prompt": PROMPT, "input": PROMPT}):
        if not ids:
            raise RequestError("input is empty: give at least one token id", param="input")
        prepared = prepare_embedding(kitchen, msgspec.json.encode({"input": ids, "encoding_format": "base64"}), caller)
    assert prepared.frame
    return prepared


def _refuse_unbuilt(request: Any) -> None:
    for path, feature in REFUSED.items():
        *owners, name = path.split(".")
        owner: Any = request
        for step in owners:
            owner = getattr(owner, step)
        if _is_set(owner, name):
            raise NotImplementedError(f"{path} is not available yet ({feature}): leave it out")
    if request.disaggregated_params.request_type:
        raise NotImplementedError("disaggregated_params.request_type: only REQUEST_TYPE_CONTEXT_AND_GENERATION works")
    if len(request.request_id) > MAX_ID_LENGTH:
        raise RequestError(f"request_id has more than {MAX_ID_LENGTH} characters: shorten it", param="request_id")


def _is_set(owner: Message, name: str) -> bool:
    return any(field.name == name for field, _ in owner.ListFields())


def _body_of(request: Any, vocab_size: int) -> CompletionBody:
    """The fields as a completion's body, which is where they are checked."""
    sampling, output = request.sampling_config, request.output_config
    given: dict[str, Any] = {name: getattr(sampling, name) for name in SAMPLING if sampling.HasField(name)}
    width = sampling.beam_width
    if width > 1:
        given |= {"use_beam_search": True, "best_of": width}
    given["n"] = sampling.num_return_sequences or max(width, 1)
    for name in ("logprobs", "prompt_logprobs"):
        if output.HasField(name):
            given[name] = getattr(output, name)
    stop_ids = [*request.stop_token_ids, *_one_each("stop_words", request.stop_words)]
    end_id = request.end_id if request.HasField("end_id") else None
    if end_id is not None and end_id >= 0:
        stop_ids.append(end_id)
    if request.HasField("guided_decoding"):
        given["guided_decoding"] = _guide(request.guided_decoding)
    if request.HasField("kv_cache_retention"):
        given["kv_cache_retention_config"] = _retention(request.kv_cache_retention.config_json)
    if request.HasField("cache_salt_id"):
        given["cache_salt"] = str(request.cache_salt_id)
    if request.embedding_bias:
        given["logit_bias"] = _bias(request.embedding_bias, vocab_size)
    return CompletionBody(
        max_tokens=request.max_tokens,
        stop=list(request.stop) or None,
        stop_token_ids=stop_ids or None,
        bad=list(request.bad) or None,
        bad_token_ids=[*request.bad_token_ids, *_one_each("bad_words", request.bad_words)] or None,
        ignore_eos=request.ignore_eos or end_id == -1,
        include_stop_str_in_output=request.include_stop_token_in_output,
        detokenize=bool(request.stop),
        stream=request.streaming,
        **given,
    )


def _one_each(name: str, sequences: Any) -> list[int]:
    for at, sequence in enumerate(sequences):
        if len(sequence.token_ids) != 1:
            problem = f"{name}[{at}] has {len(sequence.token_ids)} ids, and one is taken: send its text"
            raise RequestError(problem, param=name)
    return [sequence.token_ids[0] for sequence in sequences]


def _guide(given: Any) -> dict[str, Any]:
    kind = GUIDES.get(given.guide_type)
    if kind is None:
        raise RequestError("guided_decoding.guide_type is not set: choose one", param="guided_decoding")
    if kind == "json_object":
        return {kind: True}
    return {kind: _json(given.guide, "guided_decoding.guide") if kind == "structural_tag" else given.guide}


def _retention(text: str) -> dict[str, Any]:
    value = _json(text, "kv_cache_retention.config_json")
    if not isinstance(value, dict):
        raise RequestError("kv_cache_retention.config_json is no JSON object", param="kv_cache_retention.config_json")
    return cast("dict[str, Any]", value)


def _json(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise RequestError(f"{param} is no JSON: {error}", param=param) from None


def _bias(values: Any, vocab_size: int) -> dict[str, float]:
    if len(values) != vocab_size:
        problem = f"embedding_bias has {len(values)} values, and the vocabulary {vocab_size}: send one for each id"
        raise RequestError(problem, param="embedding_bias")
    return {str(token): value for token, value in enumerate(values) if value}
