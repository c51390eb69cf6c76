"""From a model on disk to its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from headrace.hub.errors import ModelError
from headrace.hub.gguf import GgufFile
from headrace.hub.source import ModelSource, resolve_model
from headrace.text.gguf_tokenizer import build_gguf_tokenizer
from headrace.text.hf_tokenizer import load_folder_tokenizer
from headrace.text.slow_tokenizer import load_converted_tokenizer
from headrace.text.tokenizer import Tokenizer

__all__ = ["load_tokenizer"]

TokenizerMode = Literal["auto", "slow"]


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
