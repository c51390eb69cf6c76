"""Configs of a model on disk as Hugging Face has them, whatever the file format."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any, Protocol, cast

from headrace.hub.errors import ModelError
from headrace.hub.gguf import GgufFile
from headrace.hub.source import ModelSource

__all__ = ["eos_token_ids", "merge_config", "read_config", "read_generation_config", "read_json", "text_config"]

# Control tokens that close a turn, by the chat format they belong to. A GGUF file may name another token as its EOS
# (a base model's, kept by the converter); generation would then run through the end of the turn.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL_TOKEN = 3
_GGUF_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class _HasEos(Protocol):
    @property
    def eos_ids(self) -> Set[int]: ...


def read_config(
    source: ModelSource,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    known_model_types: Collection[str] | None = None,
) -> dict[str, Any]:
    """The model's config as a config.json dict; `model_kwargs` replace its values, nested dicts key by key.

    With `known_model_types`, another `model_type` is refused, and said to want its own code if it does (`auto_map`):
    code from a model folder is never run.

    Raises:
        ModelError: unreadable or not a JSON object, no `model_type`, or one that is not known.
    """
    if source.kind == "gguf":
        config = GgufFile(source.path).hf_config()
    else:
        config = read_json(source.path / "config.json")
    merge_config(config, model_kwargs or {})
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{source.path} has a config without model_type: use a folder saved by transformers")
    if known_model_types is not None and model_type not in known_model_types:
        raise _unknown_type(source.path, config, model_type, known_model_types)
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part: `text_config` of a multimodal config, else the config itself."""
    nested = config.get("text_config")
    return cast("dict[str, Any]", nested) if isinstance(nested, dict) else config


def stated_quantisation(config: Mapping[str, Any]) -> Any:
    """`quantization_config` of the language model's part or, around it, of a multimodal config; None for neither.

    An `expert_dtype` that stands beside it (DeepSeek-V4) is put into it.
    """
    text: Mapping[str, Any] = text_config(config)
    inner, outer = text.get("quantization_config"), config.get("quantization_config")
    stated, of_experts = inner if inner or outer is None else outer, text.get("expert_dtype")
    if not of_experts or not isinstance(stated, Mapping):
        return stated
    return {"expert_dtype": of_experts, **cast("Mapping[str, Any]", stated)}


def read_quant_config(folder: Path) -> dict[str, Any] | None:
    """hf_quant_config.json, which ModelOpt writes beside config.json; None where there is none.

    Raises:
        ModelError: a file that isn't a JSON object.
    """
    path = folder / "hf_quant_config.json"
    return read_json(path) if path.is_file() else None


def read_generation_config(source: ModelSource) -> dict[str, Any]:
    """generation_config.json, or what a GGUF file says about sampling; empty if there is none.

    Raises:
        ModelError: the file is there and unreadable.
    """
    if source.kind == "hf":
        path = source.path / "generation_config.json"
        return read_json(path) if path.is_file() else {}
    metadata = GgufFile(source.path).metadata
    found = {
        ours: metadata[f"general.sampling.{theirs}"]
        for theirs, ours in _GGUF_SAMPLING.items()
        if f"general.sampling.{theirs}" in metadata
    }
    if "tokenizer.ggml.eos_token_id" in metadata:
        found["eos_token_id"] = metadata["tokenizer.ggml.eos_token_id"]
    return found


def eos_token_ids(source: ModelSource, tokenizer: _HasEos | None, *, vocab_size: int) -> frozenset[int]:
    """Every token that ends a sequence: the union of what the model's files and the tokenizer say. May be empty.

    `vocab_size` is the number of the model's embedding rows.

    Raises:
        ModelError: an id outside the vocabulary, naming the file.
    """
    named: list[tuple[str, Any]] = []
    if source.kind == "gguf":
        named.append((str(source.path), _gguf_end_ids(GgufFile(source.path).metadata)))
    else:
        config = read_json(source.path / "config.json")
        named.append(("config.json", config.get("eos_token_id")))
        named.append(("config.json", text_config(config).get("eos_token_id")))
        named.append(("generation_config.json", read_generation_config(source).get("eos_token_id")))
    if tokenizer is not None:
        named.append(("the tokenizer", sorted(tokenizer.eos_ids)))
    ids: set[int] = set()
    for where, value in named:
        for token_id in _as_ids(value, where):
            if token_id >= vocab_size:
                raise ModelError(
                    f"{where} names the EOS id {token_id}, and the model's vocabulary has {vocab_size} ids:"
                    " the files belong to different models"
                )
            ids.add(token_id)
    return frozenset(ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model.

    Raises:
        ModelError: not readable, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}): check the folder") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object: fetch it again")
    return content  # pyright: ignore[reportUnknownVariableType]


def _gguf_end_ids(metadata: Mapping[str, Any]) -> list[int]:
    ids = [metadata[key] for name in _GGUF_END_KEYS if (key := f"tokenizer.ggml.{name}") in metadata]
    template = str(metadata.get("tokenizer.chat_template", ""))
    wanted = {token for token in _END_OF_TURN if token in template}
    if wanted:
        tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
        types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
        ids += [i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == _CONTROL_TOKEN and token in wanted]
    return ids


def _as_ids(value: Any, where: str) -> list[int]:
    """None, an id or a list of ids. Negative ids are how some configs say "none"."""
    items = cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool):
            raise ModelError(f"{where} has the eos_token_id {value!r}: it must be an integer or a list of integers")
    return [item for item in items if item >= 0]


def merge_config(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Replace values in place, nested objects key by key."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge_config(config[key], value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            config[key] = value


def _unknown_type(path: Path, config: Mapping[str, Any], model_type: str, known: Collection[str]) -> ModelError:
    close = difflib.get_close_matches(model_type, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"supported types: {', '.join(sorted(known))}"
    if "auto_map" in config:
        return ModelError(
            f"{path} has the model type {model_type!r}, which needs custom code from the model folder (auto_map);"
            f" such code is never run; {hint}"
        )
    return ModelError(f"{path} has the unknown model type {model_type!r}: {hint}")
