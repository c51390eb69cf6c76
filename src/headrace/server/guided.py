"""Which constraint a body puts on the text: `response_format` as of OpenAI and TensorRT-LLM, and `guided_*` fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from headrace.front.errors import RequestError
from headrace.params import FieldError, GuidedDecodingParams
from headrace.server.bodies import GenerationBody

__all__ = ["Guided", "guided_of"]


class Guided(NamedTuple):
    params: GuidedDecodingParams | None = None
    param: str = "guided_decoding"
    """The body's field that it came from."""


def guided_of(body: GenerationBody) -> Guided:
    """Raises RequestError: an unknown form, or two constraints."""
    found = [Guided(params, name) for name, params in _given(body) if params is not None]
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise RequestError(f"{names} both constrain the text: send one", param=found[1].param)
    return found[0] if found else Guided()


def _given(body: GenerationBody) -> list[tuple[str, GuidedDecodingParams | None]]:
    given: list[tuple[str, GuidedDecodingParams | None]] = []
    if body.response_format is not None:
        given.append(("response_format", _of_format(body.response_format)))
    if body.guided_json is not None:
        given.append(("guided_json", GuidedDecodingParams(json=body.guided_json)))
    if body.guided_regex is not None:
        given.append(("guided_regex", GuidedDecodingParams(regex=body.guided_regex)))
    if body.guided_grammar is not None:
        given.append(("guided_grammar", GuidedDecodingParams(grammar=body.guided_grammar)))
    if body.guided_choice is not None:
        given.append(("guided_choice", GuidedDecodingParams(choice=body.guided_choice)))
    if body.guided_decoding is not None:
        given.append(("guided_decoding", _of_params(body.guided_decoding)))
    return given


def _of_params(given: dict[str, Any]) -> GuidedDecodingParams | None:
    known = GuidedDecodingParams.__dataclass_fields__
    for name in given:
        if name not in known:
            raise RequestError(
                f"guided_decoding.{name} is not known; known: {', '.join(known)}", param="guided_decoding"
            )
    try:
        params = GuidedDecodingParams(**{name: value for name, value in given.items() if value is not None})
    except FieldError as error:
        raise RequestError(str(error), param="guided_decoding") from None
    return params if params.chosen else None


def _of_format(given: dict[str, Any]) -> GuidedDecodingParams | None:
    kind = given.get("type")
    read = _FORMATS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise _wrong(f"type {kind!r:.60} is not known; known: {', '.join(_FORMATS)}")
    return read(given)


def _wrong(problem: str) -> RequestError:
    return RequestError(f"response_format: {problem}", param="response_format")


def _need(given: dict[str, Any], *names: str) -> Any:
    """The first of these fields that is there."""
    for name in names:
        if given.get(name) is not None:
            return given[name]
    raise _wrong(f"{names[0]} is missing")


def _json_object(given: dict[str, Any]) -> GuidedDecodingParams:
    schema = given.get("schema")
    return GuidedDecodingParams(json_object=True) if schema is None else GuidedDecodingParams(json=schema)


def _json_schema(given: dict[str, Any]) -> GuidedDecodingParams:
    wrapped = _need(given, "json_schema", "schema")
    if isinstance(wrapped, dict) and ("schema" in wrapped or "name" in wrapped):
        inner = cast("dict[str, Any]", wrapped).get("schema")
        if inner is None:
            raise _wrong("json_schema.schema is missing")
        return GuidedDecodingParams(json=inner)
    return GuidedDecodingParams(json=wrapped)


_FORMATS: dict[str, Callable[[dict[str, Any]], GuidedDecodingParams | None]] = {
    "text": lambda given: None,
    "json_object": _json_object,
    "json": _json_object,
    "json_schema": _json_schema,
    "regex": lambda given: GuidedDecodingParams(regex=_need(given, "regex", "pattern")),
    "ebnf": lambda given: GuidedDecodingParams(grammar=_need(given, "ebnf", "grammar")),
    "grammar": lambda given: GuidedDecodingParams(grammar=_need(given, "grammar", "ebnf")),
    "choice": lambda given: GuidedDecodingParams(choice=_need(given, "choice", "choices")),
    "structural_tag": lambda given: GuidedDecodingParams(structural_tag=given),
}
