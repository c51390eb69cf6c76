"""From a model on disk to its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from headrace.config.llm_args import LlmArgs
from headrace.hub.errors import ModelError
from headrace.hub.gguf import GgufFile
from headrace.hub.source import ModelSource, resolve_model
from headrace.text.gguf_tokenizer import build_gguf_tokenizer
from headrace.text.hf_tokenizer import load_folder_tokenizer
from headrace.text.slow_tokenizer import SlowTokenizer, load_converted_tokenizer
from headrace.text.tokenizer import Tokenizer

__all__ = ["as_tokenizer", "chosen_tokenizer", "load_tokenizer"]

TokenizerMode = Literal["auto", "slow"]


def chosen_tokenizer(args: LlmArgs, source: ModelSource) -> Tokenizer | None:
    """The one that the configuration asks for: an object, one from elsewhere, the model's, or none.

    Raises:
        ModelError: as `load_tokenizer`.
    """
    if args.skip_tokenizer_init:
        return None
    given = args.tokenizer
    if given is not None and not isinstance(given, str):
        return as_tokenizer(given)
    return load_tokenizer(source if given is None else given, mode=args.tokenizer_mode)


def as_tokenizer(given: Any) -> Tokenizer:
    """A caller's tokenizer object: one of ours as it is, one of transformers behind an adapter."""
    return cast("Tokenizer", given) if hasattr(given, "decode_rule") else SlowTokenizer(given)


def load_tokenizer(source: ModelSource | str | Path, *, mode: TokenizerMode = "auto") -> Tokenizer:
    """The tokenizer of a model, or of a folder that holds only a tokenizer, an alias, a .gguf file or a hub id.

    `slow` takes the Python implementation of transformers where it has one.

    Raises:
        ModelError: nothing there, damaged, of an unsupported kind, or in need of the folder's own code.
    """
    if not isinstance(source, ModelSource):
        folder = Path(source).expanduser()
        if folder.is_dir() and _has_tokenizer(folder):
            return _from_folder(folder, mode)
        try:
            source = resolve_model(str(source))
        except ModelError as error:
            raise ModelError(f"tokenizer: {error}") from None
    if source.kind == "hf":
        return _from_folder(source.path, mode)
    file = GgufFile(source.path)
    try:
        return build_gguf_tokenizer(file.metadata, architecture=file.architecture)
    except ModelError as error:
        raise ModelError(f"{source.path}: {error}") from None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def _from_folder(folder: Path, mode: TokenizerMode) -> Tokenizer:
    if mode == "auto" and (folder / "tokenizer.json").is_file():
        return load_folder_tokenizer(folder)
    if not _has_tokenizer(folder):
        raise ModelError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model): give one with --tokenizer,"
            " or set skip_tokenizer_init to work with token ids only"
        )
    return load_converted_tokenizer(folder, use_fast=mode == "auto")
