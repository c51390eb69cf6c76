"""The forms that a prompt may have in the Python API."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from headrace.params import SamplingParams

__all__ = [
    "PreprocessedInputs",
    "PromptInputs",
    "TextPrompt",
    "TokensPrompt",
    "is_one_prompt",
    "per_prompt",
    "refuse",
    "split",
]


class TextPrompt(TypedDict, total=False):
    prompt: str
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]


PromptInputs = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class PreprocessedInputs:
    """A prompt as ids, with the parameters it was made for."""

    prompt_token_ids: list[int]
    prompt: str | None = None
    sampling_params: SamplingParams | None = None


def is_one_prompt(inputs: Any) -> bool:
    """Whether this is one prompt rather than a list of them; a list that begins with an integer is one prompt's ids."""
    if isinstance(inputs, str | dict | PreprocessedInputs):
        return True
    if isinstance(inputs, list | tuple):
        items = cast("Sequence[Any]", inputs)
        return bool(items) and _is_id(items[0])
    raise ValueError(f"inputs must be text, token ids, a prompt dict or a list of those, got {type(inputs).__name__}")


def split(prompt: Any) -> tuple[str | None, list[int] | None]:
    """The text and the ids of a prompt, of which at least one is there.

    Raises:
        NotImplementedError: multimodal data and encoder inputs.
        ValueError: none of the known forms.
    """
    if isinstance(prompt, PreprocessedInputs):
        return prompt.prompt, prompt.prompt_token_ids
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list | tuple):
        return None, _ids(cast("Sequence[Any]", prompt))
    if not isinstance(prompt, dict):
        raise ValueError(f"a prompt must be text, token ids or a dict, got {type(prompt).__name__}")
    fields = cast("dict[str, Any]", prompt)
    known = {"prompt", "prompt_token_ids"}
    for name, value in fields.items():
        if name not in known and value is not None:
            raise NotImplementedError(f"prompt[{name!r}] is not built yet: leave it out")
    ids = fields.get("prompt_token_ids")
    text = fields.get("prompt")
    if ids is None and not isinstance(text, str):
        raise ValueError("a prompt dict needs 'prompt' (text) or 'prompt_token_ids'")
    return text, None if ids is None else _ids(ids)


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """An argument for each prompt: a list by position, or one value for all."""
    if not isinstance(value, list):
        return [value] * count
    values = cast("list[Any]", value)
    if len(values) != count:
        raise ValueError(f"{name} is a list of {len(values)} and there are {count} prompts: give one for each")
    return values


def refuse(**later: Any) -> None:
    """Raises NotImplementedError naming the first argument that was given."""
    for name, value in later.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not built yet: leave it out")


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _ids(values: Sequence[Any]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError("token ids must be integers: a list of prompts can't be inside a prompt") from None
