"""Settings that are valid and often regretted: a line at the start for each, and in `headrace doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from headrace.config.base import default_of
from headrace.config.kernels import DecodeCudaGraphConfig
from headrace.config.kv import KvCacheConfig
from headrace.config.llm_args import LlmArgs
from headrace.config.rules import Note
from headrace.config.serving import ServerOptions

MAX_PADDING_ROWS = 64
"""Between two captured sizes: what the default list has beyond 128."""


def traps(args: LlmArgs, server: ServerOptions) -> list[Note]:
    """What operators run into, as far as settings show it."""
    found = (*_memory(args), *_few_cached_tokens(args), *_sparse_graphs(args), *_beams(args), *_late_graphs(args))
    return [*found, *_shared_prefixes(args, server)]


def _memory(args: LlmArgs) -> Iterator[Note]:
    given, usual = args.kv_cache_config.free_gpu_memory_fraction, default_of(KvCacheConfig, "free_gpu_memory_fraction")
    if usual is not None and given > usual:
        yield Note(
            "kv_cache_config.free_gpu_memory_fraction",
            f"{given:g} leaves little for what is not known beforehand (fragmentation, libraries): after an"
            " out-of-memory error begin at 0.8",
        )


def _few_cached_tokens(args: LlmArgs) -> Iterator[Note]:
    most = args.kv_cache_config.max_tokens
    if most is not None and most < args.max_num_tokens:
        yield Note(
            "kv_cache_config.max_tokens",
            f"the cache holds {most} tokens, fewer than a step may compute ({args.max_num_tokens}, max_num_tokens):"
            " requests wait for each other's blocks. Raise it, or lower max_num_tokens",
        )


def _sparse_graphs(args: LlmArgs) -> Iterator[Note]:
    graphs = args.cuda_graph_config
    if not isinstance(graphs, DecodeCudaGraphConfig) or not graphs.enable_padding or not graphs.batch_sizes:
        return
    sizes = [0, *graphs.batch_sizes]
    gap, size = max((after - before, after) for before, after in pairwise(sizes))
    if gap > MAX_PADDING_ROWS:
        yield Note(
            "cuda_graph_config.batch_sizes",
            f"a step is padded by up to {gap - 1} rows to reach {size}: name more sizes, or leave the list out",
        )


def _beams(args: LlmArgs) -> Iterator[Note]:
    if args.max_beam_width > 1:
        message = "requests with beams are planned when the step before is known: they don't overlap with the"
        message += " host. Leave it at 1 where nobody asks for beams"
        yield Note("max_beam_width", message, "info")


def _late_graphs(args: LlmArgs) -> Iterator[Note]:
    if args.fast_start and args.cuda_graph_config is not None:
        yield Note(
            "fast_start",
            "on a GPU the first steps of each size are slow: they capture graphs. Leave it out where the"
            " first answers count",
            "info",
        )


def _shared_prefixes(args: LlmArgs, server: ServerOptions) -> Iterator[Note]:
    num_keys = len(server.api_keys)
    if num_keys > 1 and args.kv_cache_config.enable_block_reuse and not server.cache_salt_from_api_key:
        yield Note(
            "cache_salt_from_api_key",
            f"{num_keys} API keys share cached prefixes, and can tell by timing what others asked: set it where they"
            " are of different tenants",
            "info",
        )
