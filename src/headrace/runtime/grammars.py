"""What an engine compiles grammars with: a library, and the tokenizer of its model."""

from __future__ import annotations

from typing import Any

from headrace.config.llm_args import LlmArgs
from headrace.engine.compiling import OpenCompiler
from headrace.hub.config import eos_token_ids
from headrace.hub.source import ModelSource
from headrace.text.grammars.load import DEFAULT, compiler_of, require_installed
from headrace.text.grammars.vocabulary import vocabulary_of
from headrace.text.load import chosen_tokenizer


def compiler_opener(args: LlmArgs, source: ModelSource) -> OpenCompiler | None:
    """None without a tokenizer. Raises ValueError: the library that was asked for is not installed."""
    if args.skip_tokenizer_init:
        return None
    backend = args.guided_decoding_backend or DEFAULT
    require_installed(backend)

    def open_compiler(num_ids: int) -> Any:
        tokenizer = chosen_tokenizer(args, source)
        assert tokenizer is not None
        ends = eos_token_ids(source, tokenizer, vocab_size=num_ids)
        return compiler_of(backend, vocabulary_of(tokenizer, num_ids=num_ids, end_ids=ends))

    return open_compiler
