"""The tokenizer of a Hugging Face folder: tokenizer.json read by the `tokenizers` library, roles from the config files.

`transformers` is not imported here: it takes seconds, and for a tokenizer.json it ends in the same library.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers

from headrace.hub.config import read_json
from headrace.hub.errors import ModelError
from headrace.text.fast_tokenizer import FastTokenizer, add_tokens

__all__ = ["load_folder_tokenizer", "read_special_tokens"]

logger = logging.getLogger(__name__)

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_folder_tokenizer(folder: Path) -> FastTokenizer:
    """From tokenizer.json, tokenizer_config.json and special_tokens_map.json; the latter two may be missing.

    Raises:
        ModelError: a damaged file, or files that disagree about a token's id.
    """
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} can't be read ({error}): fetch it again, or update the tokenizers package") from None
    config = _optional_json(folder / "tokenizer_config.json")
    special_tokens = read_special_tokens(folder)
    _add_missing(backend, config, special_tokens, folder)
    return FastTokenizer(
        backend,
        special_tokens={role: token for role, token in special_tokens.items() if _is_known(backend, role, token)},
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
    )


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Tokens by role from special_tokens_map.json, overridden by tokenizer_config.json."""
    merged = {**_optional_json(folder / "special_tokens_map.json"), **_optional_json(folder / "tokenizer_config.json")}
    found = {role: _content(merged.get(role)) for role in _ROLES}
    return {role: token for role, token in found.items() if token is not None}


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(value: Any) -> str | None:
    """A token is written as a string, or as an object with flags."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("content")
    return value if isinstance(value, str) else None


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str], folder: Path
) -> None:
    """Registers what tokenizer_config.json declares beyond tokenizer.json, so that it is matched whole in text."""
    present = backend.get_added_tokens_decoder()
    for token_id, entry in _declared_tokens(config, folder):
        known = present.get(token_id)
        if known is not None and known.content == entry["content"] and known.special == entry.get("special", False):
            continue
        flags = {flag: entry[flag] for flag in _FLAGS if flag in entry}
        add_tokens(backend, [tokenizers.AddedToken(entry["content"], **flags)])
        if backend.token_to_id(entry["content"]) != token_id:
            raise ModelError(
                f"{folder}: tokenizer_config.json gives {entry['content']!r} the id {token_id}, tokenizer.json"
                f" {backend.token_to_id(entry['content'])}: the files belong to different models; fetch them again"
            )
    specials = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    listed: Any = config.get("additional_special_tokens")
    extra = [_content(token) for token in cast("list[Any]", listed)] if isinstance(listed, list) else []
    for token in (*special_tokens.values(), *extra):
        if token is not None and token not in specials and backend.token_to_id(token) is not None:
            add_tokens(backend, [tokenizers.AddedToken(token, special=True, normalized=False)])


def _declared_tokens(config: Mapping[str, Any], folder: Path) -> list[tuple[int, dict[str, Any]]]:
    declared: Any = config.get("added_tokens_decoder") or {}
    try:
        found = sorted(((int(key), dict(value)) for key, value in declared.items()), key=lambda pair: pair[0])
        if all(isinstance(entry["content"], str) for _, entry in found):
            return found
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise ModelError(
        f"{folder / 'tokenizer_config.json'} has an added_tokens_decoder that is no object of ids and tokens: fetch it"
        " again"
    )


def _is_known(backend: tokenizers.Tokenizer, role: str, token: str) -> bool:
    if backend.token_to_id(token) is not None:
        return True
    logger.warning("%s %r is not in the tokenizer's vocabulary and is ignored", role, token)
    return False
