"""The only place that calls a `from_pretrained`. Code that comes with a model is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from headrace.hub.errors import ModelError

__all__ = ["load_auto_tokenizer"]


def load_auto_tokenizer(folder: Path, *, use_fast: bool = True) -> Any:
    """A `transformers` tokenizer of a local folder, for the formats that the `tokenizers` library doesn't read.

    Imports transformers, which takes seconds.

    Raises:
        ModelError: transformers is missing, or refuses the folder (also because it would need the folder's own code).
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"{folder} has no tokenizer.json, and other tokenizer formats need transformers:"
            " pip install 'headrace[transformers]'"
        ) from None
    try:
        load = cast("Any", AutoTokenizer).from_pretrained
        return load(str(folder), trust_remote_code=False, local_files_only=True, use_fast=use_fast)
    except Exception as error:  # anything can come out of a foreign folder
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"the tokenizer of {folder} can't be loaded ({reason[0] if reason else type(error).__name__}):"
            " give another one with --tokenizer"
        ) from error
