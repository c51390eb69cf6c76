"""The text half of a model: tokenizer, chat template, ends of sequence, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace import wire
from headrace.config.llm_args import LlmArgs
from headrace.front.builder import RequestBuilder
from headrace.hub.config import eos_token_ids, read_generation_config
from headrace.hub.pooling import stated_pooling
from headrace.hub.source import ModelSource
from headrace.log import get
from headrace.text.grammars.load import Backend
from headrace.text.load import chosen_tokenizer
from headrace.text.template import ChatTemplate, load_chat_template
from headrace.text.tokenizer import Tokenizer

__all__ = ["TextSide", "load_text_side"]

log = get("front")

MAX_SHOWN_TOKENS = 5


@dataclass(frozen=True, kw_only=True)
class TextSide:
    """Loaded while the engine loads; `builder` needs what only the open engine knows."""

    source: ModelSource
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    """None without a tokenizer; a model that has no template has an object that says so."""
    generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_input_len: int | None = None
    pooling: Literal["last", "mean"] = "last"
    """Of embeddings, as the model's files state it."""
    grammar_backend: Backend | None = None

    def builder(self, info: wire.ModelInfo) -> RequestBuilder:
        """Raises ModelError when the model's files name an EOS token that it hasn't."""
        return RequestBuilder(
            info,
            self.tokenizer,
            eos_ids=eos_token_ids(self.source, self.tokenizer, vocab_size=info.vocab_size),
            generation_config=self.generation_config,
            max_input_len=self.max_input_len,
            grammar_backend=self.grammar_backend,
        )


def load_text_side(args: LlmArgs, source: ModelSource, *, chat_template: str | None = None) -> TextSide:
    """`chat_template` is a file or a template to use instead of the model's.

    Raises:
        ModelError: the tokenizer or the template can't be loaded.
    """
    defaults = read_generation_config(source) if args.generation_config == "auto" else {}
    limit = args.max_input_len
    tokenizer = chosen_tokenizer(args, source)
    template = None
    if tokenizer is not None:
        template = load_chat_template(source, special_tokens=tokenizer.special_tokens, override=chat_template)
        if unknown := template.unknown_tokens(tokenizer):
            shown = ", ".join(unknown[:MAX_SHOWN_TOKENS])
            log.warning("the chat template writes what is no token of this tokenizer: %s", shown)
    return TextSide(
        source=source,
        tokenizer=tokenizer,
        template=template,
        generation_config=defaults,
        max_input_len=limit if isinstance(limit, int) else None,
        pooling=stated_pooling(source) or "last",
        grammar_backend=args.guided_decoding_backend,
    )
