"""How settings of different classes fit together: contradictions are problems, silent consequences are notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from headrace import env
from headrace.config.base import ConfigModel, label_of
from headrace.config.errors import Problem, join
from headrace.config.kernels import DecodeCudaGraphConfig
from headrace.config.llm_args import LlmArgs
from headrace.config.machine import disk_problem, total_memory_bytes
from headrace.config.model import LoadFormat
from headrace.config.speculative import (
    EagleDecodingConfig,
    SADecodingConfig,
    SaveHiddenStatesDecodingConfig,
)


@dataclass(frozen=True, slots=True)
class Note:
    """Something a user should know about settings that are valid."""

    path: str
    message: str
    level: Literal["warning", "info", "debug"] = "warning"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def contradictions(args: LlmArgs) -> list[Problem]:
    """Every pair of settings that can't hold together."""
    return [problem for rule in _RULES for problem in rule(args)]


def what_this_machine_lacks(args: LlmArgs) -> list[Problem]:
    """Settings that another machine might do, and this one can't."""
    return [problem for rule in _MACHINE_RULES for problem in rule(args)]


def settle_consequences(args: LlmArgs) -> list[Note]:
    """Apply what one setting means for another; returns what was changed and what looks unintended."""
    return [note for consequence in _CONSEQUENCES for note in consequence(args)]


def _encoder_modes(args: LlmArgs) -> Iterator[Problem]:
    if args.mm_encoder_only and args.encode_only:
        yield Problem("encode_only", "can't be combined with mm_encoder_only")
    if args.mm_encoder_only and args.disable_mm_encoder:
        yield Problem("disable_mm_encoder", "can't be combined with mm_encoder_only")
    if args.encode_only and _prefill_backend(args) != "disabled":
        yield Problem("encode_only", "can't be combined with CUDA graphs of prefill (prefill_cuda_graph_backend)")
    if args.encoder_cuda_graph_config is not None:
        if args.encode_only:
            yield Problem("encoder_cuda_graph_config", "can't be combined with encode_only: use cuda_graph_config")
        if args.encoder_max_batch_size is None:
            yield Problem("encoder_max_batch_size", "required with encoder_cuda_graph_config")


def _prefill_backend(args: LlmArgs) -> str:
    if args.prefill_cuda_graph_backend == "disabled" and args.torch_compile_config is not None:
        return "piecewise" if args.torch_compile_config.enable_piecewise_cuda_graph else "disabled"
    return args.prefill_cuda_graph_backend


def _prefill_graphs(args: LlmArgs) -> Iterator[Problem]:
    backend, compiled = args.prefill_cuda_graph_backend, args.torch_compile_config
    if backend == "breakable" and compiled is not None:
        yield Problem("prefill_cuda_graph_backend", "breakable can't be combined with torch_compile_config")
    if backend == "breakable" and (args.enable_lora or args.lora_config is not None):
        yield Problem("prefill_cuda_graph_backend", "breakable can't be combined with LoRA")
    if compiled is None:
        return
    chosen = "prefill_cuda_graph_backend" in args.model_fields_set
    if compiled.enable_piecewise_cuda_graph and chosen and backend != "piecewise":
        message = f"contradicts prefill_cuda_graph_backend {backend}: remove this old spelling"
        yield Problem("torch_compile_config.enable_piecewise_cuda_graph", message)
    old, new = compiled.capture_num_tokens, args.prefill_capture_num_tokens
    if old is not None and new is not None and old != sorted(set(new)):
        message = "contradicts prefill_capture_num_tokens: remove this old spelling"
        yield Problem("torch_compile_config.capture_num_tokens", message)


def _attention(args: LlmArgs) -> Iterator[Problem]:
    if args.enable_mla_skip_correction and args.attn_backend != "TRTLLM":
        yield Problem("enable_mla_skip_correction", f"needs attn_backend TRTLLM, not {args.attn_backend}")
    cp = args.cp_config
    if cp is None:
        return
    block = args.kv_cache_config.tokens_per_block
    if cp.cp_type == "HELIX" and cp.tokens_per_block not in (None, block):
        message = f"must equal kv_cache_config.tokens_per_block ({block}) under HELIX"
        yield Problem("cp_config.tokens_per_block", message)
    given = "context_parallel_size" in args.model_fields_set
    if cp.cp_size is not None and given and cp.cp_size != args.context_parallel_size:
        message = f"contradicts context_parallel_size ({args.context_parallel_size}): keep one of them"
        yield Problem("cp_config.cp_size", message)


def _context_ranks(args: LlmArgs) -> int:
    return (args.cp_config and args.cp_config.cp_size) or args.context_parallel_size


def _expert_parallelism(args: LlmArgs) -> Iterator[Problem]:
    sizes = (args.moe_tensor_parallel_size, args.moe_expert_parallel_size, args.moe_cluster_parallel_size)
    tensor, expert, cluster = (None if size == -1 else size for size in sizes)
    ranks = args.tensor_parallel_size * _context_ranks(args)
    if tensor is not None and expert is not None:
        if tensor * expert * (cluster or 1) != ranks:
            message = f"x moe_expert_parallel_size is {tensor * expert} but tensor_parallel_size is {ranks}"
            yield Problem("moe_tensor_parallel_size", message)
        return
    for name, size in (("moe_tensor_parallel_size", tensor), ("moe_expert_parallel_size", expert)):
        if size is not None and ranks % size:
            yield Problem(name, f"{size} does not divide tensor_parallel_size ({ranks})")
    balancer = args.moe_config.load_balancer
    slots = None if balancer is None or isinstance(balancer, str) else balancer.num_slots
    if slots is not None and expert is not None and slots % expert:
        message = f"{slots} is no multiple of moe_expert_parallel_size ({expert})"
        yield Problem("moe_config.load_balancer.num_slots", message)


def _pipeline(args: LlmArgs) -> Iterator[Problem]:
    if args.pp_partition is not None and len(args.pp_partition) != args.pipeline_parallel_size:
        message = f"names {len(args.pp_partition)} stages but pipeline_parallel_size is {args.pipeline_parallel_size}"
        yield Problem("pp_partition", message)


def _deterministic(args: LlmArgs) -> Iterator[Problem]:
    if args.deterministic and args.tensor_parallel_size > 1:
        yield Problem("deterministic", "needs tensor_parallel_size 1: ranks' sums are added in an order of their own")
    if args.deterministic and args.attn_backend in ("VANILLA", "FLASHINFER"):
        yield Problem("deterministic", f"can't be combined with attn_backend {args.attn_backend}: leave it out")


def _loading(args: LlmArgs) -> Iterator[Problem]:
    if args.skip_tokenizer_init and args.post_processor_hook:
        yield Problem("post_processor_hook", "needs text: it can't be combined with skip_tokenizer_init")
    if args.custom_tokenizer and args.tokenizer is not None and not isinstance(args.tokenizer, str):
        yield Problem("custom_tokenizer", "can't be combined with a tokenizer object")
    if args.load_format is LoadFormat.GMS and args.moe_config.load_balancer is not None:
        yield Problem("moe_config.load_balancer", "can't be combined with load_format gms")


def _ray(args: LlmArgs) -> Iterator[Problem]:
    if args.orchestrator_type == "ray":
        return
    for name in ("ray_worker_extension_cls", "ray_placement_config", "ray_worker_nsight_options"):
        if args.__dict__[name] is not None:
            yield Problem(name, "needs orchestrator_type ray")


def _sampling(args: LlmArgs) -> Iterator[Problem]:
    if args.enable_speculative_beam_history_d2h and args.sampler_force_async_worker:
        yield Problem("enable_speculative_beam_history_d2h", "can't be combined with sampler_force_async_worker")


def _lora(args: LlmArgs) -> Iterator[Problem]:
    if args.lora_config is not None and args.lora_config.cuda_graph_specialize_lora and args.enable_attention_dp:
        yield Problem("lora_config.cuda_graph_specialize_lora", "can't be combined with enable_attention_dp")


def _speculation(args: LlmArgs) -> Iterator[Problem]:
    spec = args.speculative_config
    if spec is None:
        return
    if spec.use_rejection_sampling:
        path = "speculative_config.use_rejection_sampling"
        if _context_ranks(args) > 1:
            yield Problem(path, "can't be combined with context_parallel_size > 1")
        if args.guided_decoding_backend is not None and spec.decoding_type not in ("Eagle3", "Eagle"):
            yield Problem(path, "can't be combined with guided_decoding_backend")
    if args.pipeline_parallel_size > 1:
        yield Problem("speculative_config", "can't be combined with pipeline_parallel_size > 1")
    if isinstance(spec, SADecodingConfig) and (spec.global_pool_size or args.max_batch_size) < args.max_batch_size:
        message = f"must be at least max_batch_size ({args.max_batch_size})"
        yield Problem("speculative_config.global_pool_size", message)


def _connector_needs(args: LlmArgs) -> Iterator[Problem]:
    cache = args.kv_cache_config
    needs = {
        "tensor_parallel_size 1": args.tensor_parallel_size == 1,
        "kv_cache_config.enable_block_reuse true": cache.enable_block_reuse,
        "kv_cache_config.block_reuse_config.policy all_reusable": cache.block_reuse_config.policy == "all_reusable",
        "kv_cache_config.host_cache_size 0": not cache.host_cache_size,
        "kv_cache_config.disk_cache_size 0": not cache.disk_cache_size,
    }
    for need, holds in needs.items():
        if not holds:
            yield Problem("kv_connector_config", f"needs {need}")


def _transfer(args: LlmArgs) -> Iterator[Problem]:
    if args.kv_connector_config is not None:
        if args.max_beam_width > 1:
            yield Problem("kv_connector_config", "needs max_beam_width 1")
        if args.pipeline_parallel_size > 1 or _context_ranks(args) > 1:
            yield Problem("kv_connector_config", "needs pipeline_parallel_size 1 and context_parallel_size 1")
        yield from _connector_needs(args)
    if args.kv_cache_config.kv_events_config is not None and (
        args.pipeline_parallel_size > 1 or _context_ranks(args) > 1
    ):
        yield Problem("kv_cache_config.kv_events_config", "needs pipeline_parallel_size 1 and context_parallel_size 1")
    transfer = args.cache_transceiver_config
    if transfer is None or not transfer.enable_pipelined_transfer:
        return
    cache = args.kv_cache_config
    needs = {
        "enable_chunked_prefill true": args.enable_chunked_prefill,
        "pipeline_parallel_size 1": args.pipeline_parallel_size == 1,
        "context_parallel_size 1": _context_ranks(args) == 1,
        "max_beam_width 1": args.max_beam_width == 1,
        "block_reuse_config.policy all_reusable": not cache.enable_block_reuse
        or cache.block_reuse_config.policy == "all_reusable",
    }
    for need, holds in needs.items():
        if not holds:
            yield Problem("cache_transceiver_config.enable_pipelined_transfer", f"needs {need}")


def _disk_tier(args: LlmArgs) -> Iterator[Problem]:
    cache = args.kv_cache_config
    if cache.disk_cache_size and cache.disk_cache_path:
        problem = disk_problem(cache.disk_cache_path, cache.disk_cache_size * args.tensor_parallel_size)
        if problem is not None:
            yield Problem("kv_cache_config.disk_cache_path", problem)


def _host_tier(args: LlmArgs) -> Iterator[Problem]:
    size_bytes = args.kv_cache_config.host_cache_size
    if not size_bytes:
        return
    total_bytes = total_memory_bytes()
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    here = min(ranks, args.gpus_per_node or ranks)
    if size_bytes * here > total_bytes:
        each = f" for each of {here} ranks" if here > 1 else ""
        message = f"{size_bytes:,} bytes{each} are more than this machine's {total_bytes:,} bytes of memory: lower it"
        yield Problem("kv_cache_config.host_cache_size", message)


def _late_variables(args: LlmArgs) -> Iterator[Problem]:
    for name in (env.LOG_LEVEL.name, env.API_KEY.name):
        if name in (args.env_overrides or {}):
            yield Problem("env_overrides", f"{name} is read before: set it in the environment, or use its flag")


def _lengths(args: LlmArgs) -> Iterator[Problem]:
    longest, prompt = args.max_seq_len, args.max_input_len
    if isinstance(longest, int) and isinstance(prompt, int) and prompt > longest:
        yield Problem("max_input_len", f"is {prompt} but max_seq_len is {longest}: a prompt can't be longer")


_RULES: tuple[Callable[[LlmArgs], Iterator[Problem]], ...] = (
    _encoder_modes,
    _prefill_graphs,
    _attention,
    _expert_parallelism,
    _pipeline,
    _deterministic,
    _loading,
    _ray,
    _sampling,
    _lora,
    _speculation,
    _transfer,
    _lengths,
    _late_variables,
)

_MACHINE_RULES: tuple[Callable[[LlmArgs], Iterator[Problem]], ...] = (_disk_tier, _host_tier)


def _change(args: LlmArgs, path: str, value: Any, *, because: str) -> Iterator[Note]:
    """Set one derived value below `args`, with a note when it really changes."""
    *parents, name = path.split(".")
    owner: Any = args
    for parent in parents:
        owner.derive(**{parent: owner.__dict__[parent]})
        owner = owner.__dict__[parent]
    if owner.__dict__[name] != value:
        owner.derive(**{name: value})
        yield Note(path, f"set to {str(value).lower()}: {because}")


def _conversation_snapshots(args: LlmArgs) -> Iterator[Note]:
    if args.kv_cache_config.block_reuse_config.policy == "per_conversation":
        path = "kv_cache_config.mamba_state_config.periodic_snapshot_interval"
        yield from _change(args, path, 0, because="block_reuse_config.policy is per_conversation")


def _no_encoder_cache(args: LlmArgs) -> Iterator[Note]:
    if args.disable_mm_encoder:
        path = "multimodal_config.encoder_cache_max_bytes"
        yield from _change(args, path, 0, because="disable_mm_encoder leaves nothing to keep")


def _early_first_token(args: LlmArgs) -> Iterator[Note]:
    transfer = args.cache_transceiver_config
    if args.disable_overlap_scheduler or (transfer is not None and transfer.backend is not None):
        because = "it needs the overlap scheduler and no cache_transceiver_config"
        yield from _change(args, "enable_early_first_token_response", False, because=because)


def _context_parallel(args: LlmArgs) -> Iterator[Note]:
    if args.cp_config is not None and args.cp_config.cp_size is not None:
        yield from _change(args, "context_parallel_size", args.cp_config.cp_size, because="cp_config.cp_size says so")


def _drafting(args: LlmArgs) -> Iterator[Note]:
    if isinstance(args.speculative_config, EagleDecodingConfig):
        args.derive(speculative_config=args.speculative_config.as_eagle3())
        yield Note("speculative_config.decoding_type", "Eagle is read as Eagle3; EAGLE 1 and 2 heads do not work")
    spec, graphs = args.speculative_config, args.cuda_graph_config
    if spec is not None and spec.draft_len_schedule and isinstance(graphs, DecodeCudaGraphConfig):
        because = "speculative_config.draft_len_schedule changes the draft length at these batch sizes"
        yield from _change(args, "cuda_graph_config.enable_padding", True, because=because)
        if graphs.batch_sizes:
            sizes = sorted({*graphs.batch_sizes, *spec.draft_len_schedule})
            yield from _change(args, "cuda_graph_config.batch_sizes", sizes, because=because)
            graphs.derive(max_batch_size=sizes[-1])
    if isinstance(spec, SaveHiddenStatesDecodingConfig):
        because = "decoding_type SaveState works on one request at a time"
        yield from _change(args, "max_batch_size", 1, because=because)
        yield from _change(args, "disable_overlap_scheduler", True, because=because)
        yield from _change(args, "cuda_graph_config", None, because=because)


def _likely_mistakes(args: LlmArgs) -> Iterator[Note]:
    if args.max_batch_size > args.max_num_tokens:
        message = f"{args.max_batch_size} is more than the {args.max_num_tokens} tokens of a step (max_num_tokens)"
        # With both at their defaults, or only the token budget lowered, nobody asked for the larger batch.
        level = "warning" if "max_batch_size" in args.model_fields_set else "info"
        yield Note("max_batch_size", message, level)
    lora = args.lora_config
    if args.enable_lora and lora is not None and not lora.lora_dir and not lora.lora_target_modules:
        yield Note("lora_config.lora_target_modules", "empty, as is lora_dir: room is made for adapters of all modules")


def _labels(args: ConfigModel, path: str = "") -> Iterator[Note]:
    """A warning for each deprecated key that was set, a debug line for beta and prototype ones."""
    for name, field in type(args).model_fields.items():
        if name not in args.model_fields_set:
            continue
        status, here = label_of(field, "status"), join(path, name)
        if status == "deprecated" and name != "backend":
            yield Note(here, f"deprecated. {field.description}")
        elif status in ("beta", "prototype"):
            yield Note(here, f"{status}: it may change", "debug")
        value = args.__dict__[name]
        if isinstance(value, ConfigModel):
            yield from _labels(value, here)


_CONSEQUENCES: tuple[Callable[[LlmArgs], Iterator[Note]], ...] = (
    _labels,
    _context_parallel,
    _conversation_snapshots,
    _no_encoder_cache,
    _early_first_token,
    _drafting,
    _likely_mistakes,
)
