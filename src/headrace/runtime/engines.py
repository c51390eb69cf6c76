"""Which engine a configuration means: one rank in this process, or several ranks in their own."""

from __future__ import annotations

from headrace.config.llm_args import LlmArgs
from headrace.engine.engine import Engine
from headrace.hub.config import read_config, text_config
from headrace.hub.source import ModelSource
from headrace.runtime.grammars import compiler_opener
from headrace.runtime.ranks import RankGroup
from headrace.seam import EnginePort
from headrace.text.load import load_tokenizer
from headrace.text.tokenizer import check_vocabulary


def make_engine(args: LlmArgs, source: ModelSource) -> EnginePort:
    check_ranks(args, source)
    num_valid_ids = None if args.skip_tokenizer_init else tokenizer_size(args, source)
    open_compiler = compiler_opener(args, source)
    if args.tensor_parallel_size > 1:
        return RankGroup(args, source, size=args.tensor_parallel_size, num_valid_ids=num_valid_ids)
    return Engine(args, source, num_valid_ids=num_valid_ids, open_compiler=open_compiler)


def check_ranks(args: LlmArgs, source: ModelSource) -> None:
    """Before processes are started for nothing; a rank itself knows more.

    Raises:
        ValueError: more ranks than attention heads.
    """
    size = args.tensor_parallel_size
    if size == 1:
        return
    num_heads = text_config(read_config(source, model_kwargs=args.model_kwargs)).get("num_attention_heads")
    if isinstance(num_heads, int) and size > num_heads > 0:
        raise ValueError(f"tensor_parallel_size: {size} is too large for {num_heads} attention heads: use at most that")


def tokenizer_size(args: LlmArgs, source: ModelSource) -> int | None:
    """Ids that mean something: what lies beyond in a padded embedding is never sampled."""
    if args.tokenizer is not None and not isinstance(args.tokenizer, str):
        return None
    tokenizer = load_tokenizer(args.tokenizer or source, mode=args.tokenizer_mode)
    config = read_config(source, model_kwargs=args.model_kwargs)
    if "vocab_size" not in {**config, **text_config(config)}:  # the architecture's default, which the rank knows
        return tokenizer.vocab_size
    return check_vocabulary(tokenizer, config)
