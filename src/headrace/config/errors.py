"""Configuration problems: one line each, with the key's full path and where it was written."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

RENAMED: dict[str, str] = {
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "ep": "moe_expert_parallel_size",
    "moe_tp": "moe_tensor_parallel_size",
    "moe_ep": "moe_expert_parallel_size",
    "attention_dp": "enable_attention_dp",
    "gpu_memory_utilization": "kv_cache_config.free_gpu_memory_fraction",
    "mem_fraction_static": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "block_size": "kv_cache_config.tokens_per_block",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "block_reuse_policy": "block_reuse_config.policy",
    "enable_chunked_context": "enable_chunked_prefill",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
}
"""Names that people bring along from command lines, other engines and older releases."""

REMOVED: dict[str, str] = {
    "quant_config": "quantisation is read from the checkpoint",
    "calib_config": "quantisation is read from the checkpoint",
    "build_config": "there is no build step; set max_batch_size, max_num_tokens and max_seq_len directly",
    "batching_type": "batching is always in flight",
    "normalize_log_probs": "log-probabilities are never length-normalised",
    "extended_runtime_perf_knob_config": "it belonged to built engines",
    "fail_fast_on_attention_window_too_large": "windows that do not fit always fail at start",
    "enable_prompt_adapter": "prompt adapters belonged to built engines",
    "fast_build": "there is no build step",
    "eagle_choices": "trees follow the head's confidence: use_dynamic_tree",
    "eagle3_one_model": "target and head always run as one",
    "greedy_sampling": "drafts are verified with the request's own sampling",
    "posterior_threshold": "drafts are accepted exactly, or with use_rejection_sampling",
}
"""Keys of older releases that have no successor, and why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration."""

    path: str
    """Dotted key, for example `kv_cache_config.tokens_per_block`; empty for a whole file."""
    message: str
    source: str = ""
    """Where it was written: `config.yml:12`, `--tp_size`, `--set`; empty when unknown."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.message) if part)


class ConfigError(ValueError):
    """A configuration that can't be used; `str()` is one line per problem."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems
        super().__init__("\n".join(str(problem) for problem in self.problems))


def model_classes(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic classes that an annotation mentions, outermost first, through unions and containers."""
    if get_origin(annotation) is None:
        return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
    return [cls for arg in get_args(annotation) for cls in model_classes(arg)]


def problems_from(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Pydantic's errors as our problems: dotted paths, plain words, one problem a key."""
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        place = _locate(root, item["loc"])
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            for problem in inner.problems:
                path = join(place.path, problem.path)
                found.setdefault(path, replace(problem, path=path))
            continue
        kind = item["type"]
        if kind == "extra_forbidden":
            message = unknown_key(place.key, place.owner, root=root)
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            message = _bad_tag(item)
        elif kind == "missing":
            message = "required"
        elif kind in ("value_error", "assertion_error"):
            message = str(inner)
        elif "ctx" in item and kind.startswith(("greater", "less", "multiple", "too_")):
            limit = item["msg"].split(" should ", 1)[-1]
            message = f"must {limit}, got {_shown(item['input'])}"
        else:
            message = f"expected {describe(place.annotation)}, got {_shown(item['input'])}"
        found.setdefault(place.path, Problem(place.path, message))
    return list(found.values())


def join(parent: str, child: str) -> str:
    """`a` and `b` as `a.b`; either may be empty, an index keeps its bracket."""
    if not parent or not child:
        return parent or child
    return f"{parent}{child}" if child.startswith("[") else f"{parent}.{child}"


def unknown_key(key: str, owner: type[BaseModel], *, root: type[BaseModel] | None = None) -> str:
    """The message for a key that `owner` does not have, with the nearest valid name anywhere under `root`."""
    if key in REMOVED:
        return f"no longer an option: {REMOVED[key]}"
    suggestion = suggest(key, owner, root or owner)
    return "unknown key" + (f", did you mean '{suggestion}'?" if suggestion else f": {KEYS_ARE_IN}")


KEYS_ARE_IN = "remove it, or look for the right name in 'headrace config schema'"


def suggest(key: str, owner: type[BaseModel], root: type[BaseModel]) -> str:
    """The closest valid name to `key`, as a bare name in `owner` or as a full path elsewhere; '' if none is near."""
    names = own_keys(owner)
    normal = key.strip().lower().replace("-", "_")
    if normal in names:
        return normal
    target = RENAMED.get(normal, "")
    if target and (target.split(".")[0] in names or owner is not root):
        return target
    here, here_score = _closest(normal, names, cutoff=0.6)
    places = list(leaf_paths(root))
    there, there_score = _closest(normal, [path.rsplit(".", 1)[-1] for path in places], cutoff=0.8)
    if there and there_score - _ELSEWHERE_PENALTY > here_score:
        return min(
            (path for path in places if path.rsplit(".", 1)[-1] == there),
            key=lambda path: (path.count("."), not path.startswith("kv_cache_config."), path),
        )
    return here


_ELSEWHERE_PENALTY = 0.1
"""A name of the same mapping is the likelier one, unless one elsewhere is clearly closer."""


def _closest(key: str, names: Sequence[str], *, cutoff: float) -> tuple[str, float]:
    near = difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
    return (near[0], difflib.SequenceMatcher(None, near[0], key).ratio()) if near else ("", 0.0)


def own_keys(cls: type[BaseModel]) -> list[str]:
    """Keys that may stand directly in a mapping of this class."""
    names = [name for name in cls.model_fields if name not in transparent(cls)]
    for name in transparent(cls):
        names += [key for child in model_classes(cls.model_fields[name].annotation) for key in child.model_fields]
    return names


def transparent(cls: type[BaseModel]) -> frozenset[str]:
    """Fields of `cls` whose keys stand beside its own (see `ServerGroupConfig`)."""
    return cast("frozenset[str]", cls.__dict__.get("TRANSPARENT", frozenset[str]()))


def leaf_paths(root: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Every dotted key under `root`, parents before children."""
    for name, field in root.model_fields.items():
        path = prefix if name in transparent(root) else join(prefix, name)
        if path != prefix:
            yield path
        for cls in model_classes(field.annotation):
            if prefix.count(".") < 4:
                yield from leaf_paths(cls, path)


def describe(annotation: Any) -> str:
    """What a value of this type looks like, in the words of a person who writes YAML."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return describe(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        parts = [describe(arg) for arg in get_args(annotation) if arg is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        values = get_args(annotation)
        return ("one of " if len(values) > 1 else "") + ", ".join(_word(value) for value in values)
    if origin in (list, tuple, set, frozenset):
        inner = get_args(annotation)
        return f"a list ({describe(inner[0])} each)" if inner else "a list"
    if origin is dict:
        return "a mapping"
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            return "one of " + ", ".join(str(member.value) for member in annotation)
        if issubclass(annotation, BaseModel):
            return "a mapping"
        return _WORDS.get(annotation.__name__, "text")
    return "another value"


_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}


@dataclass(slots=True)
class _Place:
    path: str
    key: str
    owner: type[BaseModel]
    annotation: Any
    """Declared type of the value at `path`."""


def _locate(root: type[BaseModel], loc: tuple[int | str, ...]) -> _Place:
    """Follow pydantic's location through the classes; labels of union branches drop out of the path."""
    place = _Place("", "", root, root)
    classes: list[type[BaseModel]] = [root]
    for part in loc:
        classes = _narrow(classes, part)
        owner = next((cls for cls in classes if part in cls.model_fields), None)
        origin = get_origin(place.annotation)
        if owner is not None and isinstance(part, str):
            place.owner, place.key, place.annotation = owner, part, _declared(owner, part)
            if part not in transparent(owner):
                place.path = join(place.path, part)
        elif isinstance(part, int):
            place.path = f"{place.path}[{part}]"
            place.annotation = _item(place.annotation)
        elif origin is not None and dict in _origins(place.annotation):
            place.path = join(place.path, part)
            place.annotation = _item(place.annotation)
        elif classes and part not in _tags(classes) | _scalars(place.annotation) and _is_model(place.annotation):
            place.path, place.key, place.owner = join(place.path, part), part, classes[0]
            return place
        else:
            continue
        classes = model_classes(place.annotation)
    return place


def _declared(owner: type[BaseModel], name: str) -> Any:
    return owner.model_fields[name].annotation


def _narrow(classes: list[type[BaseModel]], part: int | str) -> list[type[BaseModel]]:
    chosen = [cls for cls in classes if part in _tags([cls]) and part not in cls.model_fields]
    return chosen or classes


def _tags(classes: Sequence[type[BaseModel]]) -> set[str]:
    """Labels that pydantic may use for these classes inside a union: class names and discriminator values."""
    tags = {cls.__name__ for cls in classes}
    for cls in classes:
        for field in cls.model_fields.values():
            values = get_args(field.annotation)
            if get_origin(field.annotation) is Literal and len(values) == 1:
                tags.add(str(values[0]))
    return tags


def _is_model(annotation: Any) -> bool:
    return bool(model_classes(annotation)) and not {list, dict} & _origins(annotation)


def _scalars(annotation: Any) -> set[str]:
    """Labels that pydantic may use for the plain types of a union."""
    return {kind.__name__ for kind in _origins(annotation) & {str, int, float, bool}}


def _origins(annotation: Any) -> set[Any]:
    """Container types an annotation may be, through unions and Annotated."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _origins(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return {kind for arg in get_args(annotation) for kind in _origins(arg)}
    return {origin if origin is not None else annotation}


def _item(annotation: Any) -> Any:
    """The element type of a list or the value type of a dict, through unions."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is typing.Annotated:
        return _item(args[0])
    if origin in (Union, types.UnionType):
        return next((_item(arg) for arg in args if get_origin(arg) in (list, tuple, dict, set)), Any)
    return args[-1] if origin is dict and args else args[0] if args else Any


def _bad_tag(item: Any) -> str:
    context = item.get("ctx", {})
    name = str(context.get("discriminator", "")).strip("'")
    expected = str(context.get("expected_tags", "")).replace("'", "")
    if item["type"] == "union_tag_not_found":
        return f"needs the key {name}" + (f" (one of {expected})" if expected else "")
    return f"{name} must be one of {expected}, got {context.get('tag')!r}"


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def _shown(value: object) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    if value is None:
        text = "null"
    return text if len(text) <= 60 else text[:57] + "..."
