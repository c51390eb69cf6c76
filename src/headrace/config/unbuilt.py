"""Which settings do something today: one table, checked against the classes by a test.

Every top-level key and every key of a class that is listed in part stands in exactly one of the
tables. Building a feature moves its keys from `UNBUILT` to `BUILT`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.config.base import ConfigModel, default_of
from headrace.config.errors import Problem, join
from headrace.config.llm_args import COMPUTE_DTYPES, LlmArgs
from headrace.config.model import LoadFormat
from headrace.config.rules import Note
from headrace.config.serving import ServerOptions

BUILT: frozenset[str] = frozenset({
    "model", "model_impl", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "revision",
    "tokenizer_revision", "model_kwargs", "generation_config", "tensor_parallel_size", "max_batch_size",
    "max_num_tokens", "max_beam_width", "max_input_len", "max_seq_len", "scheduler_config.capacity_scheduler_policy",
    "scheduler_config.context_chunking_policy", "scheduler_config.waiting_queue_policy",
    "scheduler_config.use_python_scheduler", "scheduler_config.enable_prefix_aware_scheduling",
    "enable_chunked_prefill", "guided_decoding_backend", "disable_overlap_scheduler", "batch_wait_timeout_ms",
    "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", "stream_interval", "attn_backend",
    "gather_generation_logits",
    "kv_cache_config.enable_block_reuse", "kv_cache_config.max_tokens", "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_config.max_gpu_total_bytes", "kv_cache_config.tokens_per_block", "kv_cache_config.max_attention_window",
    "kv_cache_config.sink_token_length", "kv_cache_config.pool_ratio", "kv_cache_config.avg_seq_len",
    "kv_cache_config.enable_partial_reuse", "kv_cache_config.copy_on_partial_reuse",
    "kv_cache_config.block_reuse_config.policy", "kv_cache_config.block_reuse_config.max_num_turns",
    "kv_cache_config.host_cache_size", "kv_cache_config.disk_cache_size", "kv_cache_config.disk_cache_path",
    "kv_cache_config.disk_prefetch_num_reqs", "kv_cache_config.secondary_offload_min_priority",
    "kv_cache_config.event_buffer_max_size", "kv_cache_config.mamba_ssm_cache_dtype",
    "kv_cache_config.mamba_state_cache_interval", "kv_cache_config.mamba_state_config",
    "kv_cache_config.iteration_stats_interval", "kv_cache_config.max_util_for_resume",
    "iter_stats_max_iterations",
    "max_stats_len", "enable_iter_perf_stats", "print_iter_log", "return_perf_metrics",
    "garbage_collection_gen0_threshold", "env_overrides", "telemetry_config", "backend", "max_queued_requests",
    "max_queued_tokens", "request_timeout_s", "shutdown_timeout_s", "engine_threads", "max_step_s",
    "stall_timeout_s", "fast_start", "deterministic", "reasoning_parser", "profile_dir", "num_serve_frontends",
    "num_postprocess_workers", "prometheus_metrics_config", "otlp_traces_endpoint",
    "force_dynamic_quantization", "cuda_graph_config", "prefill_capture_num_tokens",
    "kv_connector_config.connector_module",
    "kv_connector_config.connector_scheduler_class", "kv_connector_config.connector_worker_class",
    "kv_connector_config.server_url", "moe_config.backend", "moe_config.max_num_tokens",
})  # fmt: skip
"""Keys whose every value works."""

BUILT_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (COMPUTE_DTYPES, "quantised weights"),
    "load_format": ((LoadFormat.AUTO, LoadFormat.DUMMY), "this way of loading weights"),
    "checkpoint_format": ((None, "HF", "hf"), "checkpoint formats other than HF"),
    "moe_cluster_parallel_size": ((None, -1, 1), "expert parallelism"),
    "moe_tensor_parallel_size": ((None, -1, 1), "splitting experts over ranks"),
    "moe_expert_parallel_size": ((None, -1, 1), "expert parallelism"),
    "kv_cache_config.dtype": (
        ("auto", "float16", "bfloat16", "float32", "fp8", "float8_e4m3fn"),
        "a KV cache in fewer than 8 bits",
    ),
    "kv_cache_config.kv_cache_event_hash_algo": (
        ("auto", "v2_sha256", "v2_sha256_64"),
        "the reference's older hash of events",
    ),
    "kv_connector_config.connector": (
        (None,),
        "presets of connectors; name a module and its two classes instead",
    ),
    "cache_transceiver_config.backend": ((None,), "KV transfer between servers"),
}
"""Keys of which these values work, and what the others would need."""

UNBUILT: dict[str, str] = {
    "custom_tokenizer": "custom tokenizers",
    "post_processor_hook": "post-processor hooks",
    "checkpoint_loader": "checkpoint loader objects",
    "mx_config": "weight transfer from peers",
    "gms_config": "the GPU memory service",
    "mm_encoder_only": "multimodal encoders",
    "disable_mm_encoder": "multimodal models",
    "encode_only": "encode-only mode",
    "pipeline_parallel_size": "pipeline parallelism",
    "context_parallel_size": "context parallelism",
    "enable_attention_dp": "attention data parallelism",
    "enable_lm_head_tp_in_adp": "attention data parallelism",
    "attention_dp_config": "attention data parallelism",
    "pp_partition": "pipeline parallelism",
    "cp_config": "context parallelism",
    "dwdp_config": "distributed weight data parallelism",
    "orchestrator_type": "other orchestrators than local processes",
    "mpi_session": "MPI sessions",
    "ray_worker_extension_cls": "the Ray orchestrator",
    "ray_placement_config": "the Ray orchestrator",
    "ray_worker_nsight_options": "the Ray orchestrator",
    "encoder_max_batch_size": "multimodal encoders",
    "encoder_max_num_tokens": "multimodal encoders",
    "encoder_cuda_graph_config": "multimodal encoders",
    "reorder_policy_config": "agent-aware scheduling",
    "enable_resource_governor": "the resource governor",
    "moe_config.load_balancer": "expert load balancing",
    "enable_mla_skip_correction": "approximate MLA",
    "mla_skip_correction_threshold": "approximate MLA",
    "layer_wise_benchmarks_config": "layer measurements",
    "batched_logits_processor": "batched logits processors",
    "speculative_config": "speculative decoding",
    "sparse_attention_config": "sparse attention",
    "kv_cache_compression_config": "KV cache compression",
    "enable_return_routed_experts": "returning routed experts",
    "cache_transceiver_config": "KV transfer between servers",
    "enable_lora": "LoRA adapters",
    "lora_config": "LoRA adapters",
    "peft_cache_config": "LoRA adapters",
    "multimodal_config": "multimodal models",
    "sleep_config": "sleeping",
    "request_stats_max_iterations": "per-request step statistics",
    "enable_iter_req_stats": "per-request step statistics",
    "iter_perf_stats_interval": "sampled step statistics",
    "perf_metrics_output_dir": "the request metrics file",
    "per_request_spec_decode_stats": "speculative decoding",
    "enable_energy_metrics": "energy metrics",
    "kv_cache_config.cross_kv_cache_fraction": "encoder-decoder models",
    "kv_cache_config.kv_events_config": "publishing KV cache events",
    "kv_cache_config.block_reuse_config.swa_endpoint_rewind_tokens": "keeping more of a window at a turn's end",
    "kv_cache_config.mamba_ssm_stochastic_rounding": "rounding states at random",
    "kv_cache_config.mamba_ssm_philox_rounds": "rounding states at random",
}
"""Keys that only their default works for, and what they would need."""

WITHOUT_EFFECT: dict[str, str] = {
    "enable_tokenization_cache": "prompts are always tokenised in full",
    "checkpoint_io_policy": "files are read in one way",
    "gpus_per_node": "ranks are local processes",
    "allreduce_strategy": "sums over ranks have one form",
    "scheduler_config.dynamic_batch_config": "batch limits are not tuned at run time",
    "enable_early_first_token_response": "tokens are sent as soon as they are known",
    "enable_encoder_decoder_mixed_cuda_graph": "CUDA graphs",
    "prefill_cuda_graph_backend": "passes with prompts are captured whole; prefill_capture_num_tokens: [] is off",
    "torch_compile_config": "compilation",
    "moe_config.disable_finalize_fusion": "kernel choice",
    "moe_config.use_low_precision_moe_combine": "expert parallelism only",
    "nvfp4_gemm_config": "kernel choice",
    "enable_autotuner": "kernel choice",
    "enable_min_latency": "kernel choice",
    "enable_low_latency_host_dispatch": "kernel choice",
    "use_fine_grained_sync": "kernel choice",
    "use_cute_dsl_blockscaling_mm": "kernel choice",
    "use_cute_dsl_blockscaling_bmm": "kernel choice",
    "use_cute_dsl_bf16_bmm": "kernel choice",
    "use_cute_dsl_bf16_gemm": "kernel choice",
    "enable_layerwise_nvtx_marker": "profiler marks",
    "enable_in_graph_sampling": "CUDA graphs",
    "sampler_force_async_worker": "copies to the host",
    "enable_speculative_beam_history_d2h": "copies to the host",
    "decoding_config": "ignored",
    "sampler_type": "ignored",
    "postprocess_tokenizer_dir": "text is made in the server's process",
    "perf_metrics_max_requests": "ignored",
    "kv_cache_config.attention_dp_events_gather_period_ms": "KV cache events only",
    "kv_cache_config.use_uvm": "ignored",
    "kv_cache_config.use_kv_cache_manager_v2": "there is one manager",
    "kv_cache_config.enable_swa_scratch_reuse": "pool sizing",
    "kv_cache_config.enable_kv_pool_rebalance": "pool sizing",
    "kv_cache_config.kv_pool_rebalance_min_sampled_kv_caches": "pool sizing",
    "kv_cache_config.kv_pool_rebalance_cooldown_secs": "pool sizing",
    "kv_cache_config.kv_pool_rebalance_target_ratio_update_interval": "pool sizing",
    "kv_cache_config.kv_pool_rebalance_ratio_threshold": "pool sizing",
    "kv_cache_config.kv_pool_rebalance_moving_average_decay": "pool sizing",
    "kv_cache_config.kv_pool_rebalance_check_interval": "pool sizing",
    "kv_cache_config.fp8_context_mla_kv_len_cap": "kernel workspace",
}
"""Keys that tune speed and can't change results, and what they would tune."""

UNBUILT_SERVER: dict[str, str] = {
    "custom_module_dirs": "extra model code",
    "media_io_kwargs": "multimodal models",
    "grpc_protocol": "this dialect of gRPC: use smg",
    "metadata_server_config_file": "disaggregated serving",
    "server_role": "disaggregated serving",
    "disagg_cluster_uri": "disaggregated serving",
    "disagg_cluster": "disaggregated serving",
    "internal_request_auth_key": "disaggregated serving",
    "report_addr": "reporting the server's address",
    "enable_visual_gen": "image and video generation",
    "visual_gen_args": "image and video generation",
}


def refuse_unbuilt(args: LlmArgs) -> list[Problem]:
    """A problem for every key that is set to something which does not work yet."""
    found: list[Problem] = []
    for path, (works, feature) in BUILT_VALUES.items():
        value, default = _look_up(args, path)
        if value is not default and value not in works:
            found.append(Problem(path, _not_yet(feature, value)))
    for path, feature in UNBUILT.items():
        value, default = _look_up(args, path)
        if value != default and not _covered(path, value, default):
            found.append(Problem(path, _not_yet(feature)))
    return found


def refuse_unbuilt_server(options: ServerOptions) -> list[Problem]:
    """The same for the server's own options."""
    return [
        Problem(name, _not_yet(feature))
        for name, feature in UNBUILT_SERVER.items()
        if options.__dict__[name] != default_of(ServerOptions, name)
    ]


def without_effect(args: LlmArgs) -> list[Note]:
    """One line that lists every accepted key which tunes something that is not here."""
    keys = [path for path in WITHOUT_EFFECT if (pair := _look_up(args, path))[0] != pair[1]]
    return [Note("", f"no effect on this device: {', '.join(keys)}", "info")] if keys else []


def classified() -> Iterable[str]:
    """Every key of the tables."""
    return (*BUILT, *BUILT_VALUES, *UNBUILT, *WITHOUT_EFFECT)


def _not_yet(feature: str, value: Any = None) -> str:
    return f"{'' if value is None else f'{value} is '}not available yet ({feature})"


def _covered(path: str, value: Any, default: Any) -> bool:
    """Whether only keys differ that the tables list by themselves below `path`."""
    listed = {other for other in BUILT_VALUES if other.startswith(path + ".")}
    if not listed or not isinstance(value, ConfigModel):
        return False
    base = default if isinstance(default, ConfigModel) else None
    return all(
        join(path, name) in listed or item == (base.__dict__[name] if base else default_of(type(value), name))
        for name, item in value.__dict__.items()
    )


def _look_up(args: LlmArgs, path: str) -> tuple[Any, Any]:
    """Value and default of a dotted key; equal when an object on the way is unset."""
    owner: ConfigModel = args
    *parents, name = path.split(".")
    for parent in parents:
        held = owner.__dict__[parent]
        if not isinstance(held, ConfigModel):
            return None, None
        owner = held
    return owner.__dict__[name], default_of(type(owner), name)
