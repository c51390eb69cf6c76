"""From a backend's name to its compiler and its checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from headrace.text.grammars import llguidance, xgrammar
from headrace.text.grammars.vocabulary import Vocabulary
from headrace.types import Grammar

__all__ = ["DEFAULT", "Backend", "checker_of", "compiler_of", "require_installed"]

Backend = Literal["llguidance", "xgrammar"]
DEFAULT: Backend = "llguidance"

Check = Callable[[Grammar, Mapping[str, int]], None]


def require_installed(backend: Backend) -> None:
    """Raises ValueError with the remedy."""
    if importlib.util.find_spec(backend) is None:
        remedy = "pip install xgrammar, or leave the setting out" if backend == "xgrammar" else "pip install llguidance"
        raise ValueError(f"guided_decoding_backend: {backend} is not installed: {remedy}")


def compiler_of(backend: Backend, vocabulary: Vocabulary) -> Any:
    """An engine's `GrammarCompiler`. Takes a second or so for a large vocabulary.

    Raises:
        ValueError: the library is not installed.
    """
    require_installed(backend)
    if backend == "xgrammar":
        return xgrammar.XgrammarCompiler(vocabulary)
    return llguidance.LlguidanceCompiler(vocabulary)


def checker_of(backend: Backend) -> Check:
    """Says what is wrong with a grammar, as far as that can be said without a vocabulary. Raises GrammarError."""
    return xgrammar.check if backend == "xgrammar" else cast("Check", llguidance.check)
