"""Settings of different classes that contradict each other, and consequences that are applied and told."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import (
    CacheTransceiverConfig,
    CudaGraphConfig,
    KvCacheConfig,
    LoraConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SaveHiddenStatesDecodingConfig,
)
from headrace.config.errors import ConfigError
from headrace.config.resolution import Resolved, resolve

PIPELINED = {"backend": "NIXL", "enable_pipelined_transfer": True}
CONNECTOR = {"connector": "lmcache"}
LAYOUT = {"num_slots": 5}


def made(**arguments: Any) -> Resolved:
    return resolve(arguments=arguments, needs_model=False, refuse_missing_features=False)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"encode_only": True, "mm_encoder_only": True}, "encode_only"),
        ({"disable_mm_encoder": True, "mm_encoder_only": True}, "disable_mm_encoder"),
        ({"encode_only": True, "prefill_cuda_graph_backend": "piecewise"}, "encode_only"),
        ({"deterministic": True, "tensor_parallel_size": 2}, "deterministic"),
        ({"deterministic": True, "attn_backend": "VANILLA"}, "deterministic"),
        ({"deterministic": True, "attn_backend": "FLASHINFER"}, "deterministic"),
        ({"encode_only": True, "torch_compile_config": {"enable_piecewise_cuda_graph": True}}, "encode_only"),
        ({"encoder_cuda_graph_config": {"num_tokens": [8]}}, "encoder_max_batch_size"),
        ({"encoder_cuda_graph_config": {}, "encoder_max_batch_size": 4, "encode_only": True},
         "encoder_cuda_graph_config"),
        ({"prefill_cuda_graph_backend": "breakable", "torch_compile_config": {}}, "prefill_cuda_graph_backend"),
        ({"prefill_cuda_graph_backend": "breakable", "enable_lora": True}, "prefill_cuda_graph_backend"),
        ({"prefill_cuda_graph_backend": "disabled", "torch_compile_config": {"enable_piecewise_cuda_graph": True}},
         "torch_compile_config.enable_piecewise_cuda_graph"),
        ({"prefill_capture_num_tokens": [1], "torch_compile_config": {"capture_num_tokens": [2]}},
         "torch_compile_config.capture_num_tokens"),
        ({"enable_mla_skip_correction": True, "attn_backend": "FLASHINFER"}, "enable_mla_skip_correction"),
        ({"cp_config": {"cp_type": "HELIX", "tokens_per_block": 64}}, "cp_config.tokens_per_block"),
        ({"cp_config": {"cp_size": 2}, "context_parallel_size": 4}, "cp_config.cp_size"),
        ({"tensor_parallel_size": 8, "moe_tensor_parallel_size": 4, "moe_expert_parallel_size": 4},
         "moe_tensor_parallel_size"),
        ({"tensor_parallel_size": 8, "moe_expert_parallel_size": 3}, "moe_expert_parallel_size"),
        ({"tensor_parallel_size": 8, "moe_expert_parallel_size": 2, "moe_config": {"load_balancer": LAYOUT}},
         "moe_config.load_balancer.num_slots"),
        ({"pipeline_parallel_size": 2, "pp_partition": [1, 2, 3]}, "pp_partition"),
        ({"skip_tokenizer_init": True, "post_processor_hook": "a.b"}, "post_processor_hook"),
        ({"custom_tokenizer": "deepseek_v32", "tokenizer": object()}, "custom_tokenizer"),
        ({"load_format": "gms", "moe_config": {"load_balancer": {}}}, "moe_config.load_balancer"),
        ({"ray_worker_extension_cls": "a.b"}, "ray_worker_extension_cls"),
        ({"ray_placement_config": {}}, "ray_placement_config"),
        ({"enable_speculative_beam_history_d2h": True, "sampler_force_async_worker": True},
         "enable_speculative_beam_history_d2h"),
        ({"enable_attention_dp": True, "lora_config": LoraConfig(cuda_graph_specialize_lora=True)},
         "lora_config.cuda_graph_specialize_lora"),
        ({"speculative_config": MTPDecodingConfig(use_rejection_sampling=True), "context_parallel_size": 2},
         "speculative_config.use_rejection_sampling"),
        ({"speculative_config": MTPDecodingConfig(use_rejection_sampling=True), "guided_decoding_backend": "xgrammar"},
         "speculative_config.use_rejection_sampling"),
        ({"speculative_config": NGramDecodingConfig(max_draft_len=2), "pipeline_parallel_size": 2},
         "speculative_config"),
        ({"speculative_config": SADecodingConfig(max_draft_len=2, global_pool_size=4), "max_batch_size": 8},
         "speculative_config.global_pool_size"),
        ({"kv_connector_config": CONNECTOR, "max_beam_width": 2}, "kv_connector_config"),
        ({"kv_connector_config": CONNECTOR, "pipeline_parallel_size": 2}, "kv_connector_config"),
        ({"kv_connector_config": CONNECTOR, "tensor_parallel_size": 2}, "kv_connector_config"),
        ({"kv_connector_config": CONNECTOR, "kv_cache_config": {"host_cache_size": 1 << 20}}, "kv_connector_config"),
        ({"kv_connector_config": CONNECTOR, "kv_cache_config": {"enable_block_reuse": False}}, "kv_connector_config"),
        ({"kv_connector_config": CONNECTOR, "kv_cache_config": {"block_reuse_config": {"policy": "per_request"}}},
         "kv_connector_config"),
        ({"kv_cache_config": {"kv_events_config": {}}, "context_parallel_size": 2}, "kv_cache_config.kv_events_config"),
        ({"cache_transceiver_config": PIPELINED, "enable_chunked_prefill": False},
         "cache_transceiver_config.enable_pipelined_transfer"),
        ({"cache_transceiver_config": PIPELINED, "kv_cache_config": {"block_reuse_config": {"policy": "per_request"}}},
         "cache_transceiver_config.enable_pipelined_transfer"),
        ({"kv_cache_config": {"disk_cache_size": 1, "disk_cache_path": "/no/such/folder"}},
         "kv_cache_config.disk_cache_path"),
        ({"max_seq_len": 10, "max_input_len": 11}, "max_input_len"),
    ],
)  # fmt: skip
def test_contradictions(arguments: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**arguments)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 8, "moe_tensor_parallel_size": 4, "moe_expert_parallel_size": 2},
        {"tensor_parallel_size": 8, "moe_expert_parallel_size": -1, "moe_tensor_parallel_size": 8},
        {"prefill_cuda_graph_backend": "piecewise", "torch_compile_config": {"enable_piecewise_cuda_graph": True}},
        {"cp_config": {"cp_type": "HELIX", "tokens_per_block": 32}},
        {"cp_config": {"cp_size": 4}, "context_parallel_size": 4},
        {"cache_transceiver_config": PIPELINED},
        {"orchestrator_type": "ray", "ray_worker_extension_cls": "a.b"},
        {"max_seq_len": 10, "max_input_len": 10},
        {"max_seq_len": "auto", "max_input_len": 11},
    ],
)
def test_what_fits_together_passes(arguments: dict[str, Any]) -> None:
    made(**arguments)


def notes(resolved: Resolved) -> dict[str, str]:
    return {note.path: note.message for note in resolved.notes if note.level != "debug" and note.path}


def test_conversations_take_no_periodic_snapshots() -> None:
    cache = {
        "block_reuse_config": {"policy": "per_conversation"},
        "mamba_state_config": {"periodic_snapshot_interval": 64},
    }
    resolved = made(kv_cache_config=cache)
    assert resolved.args.kv_cache_config.mamba_state_config.periodic_snapshot_interval == 0
    path = "kv_cache_config.mamba_state_config.periodic_snapshot_interval"
    assert notes(resolved)[path].startswith("set to 0: ")


def test_no_encoder_no_cache() -> None:
    assert made(disable_mm_encoder=True).args.multimodal_config.encoder_cache_max_bytes == 0


@pytest.mark.parametrize(
    "off", [{"disable_overlap_scheduler": True}, {"cache_transceiver_config": CacheTransceiverConfig(backend="UCX")}]
)
def test_early_first_token_is_switched_off(off: dict[str, Any]) -> None:
    resolved = made(enable_early_first_token_response=True, **off)
    assert not resolved.args.enable_early_first_token_response
    assert "enable_early_first_token_response" in notes(resolved)
    assert made(enable_early_first_token_response=True).args.enable_early_first_token_response


def test_size_of_context_parallelism_has_one_value() -> None:
    resolved = made(cp_config={"cp_size": 4})
    assert resolved.args.context_parallel_size == 4
    assert resolved.origin("context_parallel_size") == "derived"


def test_old_eagle_is_converted() -> None:
    resolved = made(speculative_config={"decoding_type": "Eagle", "max_draft_len": 2, "speculative_model": "d"})
    assert resolved.args.speculative_config is not None
    assert resolved.args.speculative_config.decoding_type == "Eagle3"
    assert "speculative_config.decoding_type" in notes(resolved)


def test_a_draft_schedule_changes_the_graphs() -> None:
    spec = {"decoding_type": "MTP", "draft_len_schedule": {4: 3, 24: 1}}
    resolved = made(speculative_config=spec, cuda_graph_config={"batch_sizes": [1, 8]})
    graphs = resolved.args.cuda_graph_config
    assert isinstance(graphs, CudaGraphConfig)
    assert (graphs.enable_padding, graphs.batch_sizes, graphs.max_batch_size) == (True, [1, 4, 8, 24], 24)


def test_saving_states_takes_one_request_at_a_time() -> None:
    args = made(speculative_config=SaveHiddenStatesDecodingConfig(output_directory="o")).args
    assert (args.max_batch_size, args.disable_overlap_scheduler, args.cuda_graph_config) == (1, True, None)


def test_likely_mistakes_are_told() -> None:
    assert "max_batch_size" in notes(made(max_batch_size=64, max_num_tokens=32))
    assert "lora_config.lora_target_modules" in notes(made(enable_lora=True, lora_config={}))
    assert notes(made()) == {}


def test_labels_are_told() -> None:
    resolved = made(kv_cache_config=KvCacheConfig(use_uvm=False, max_util_for_resume=0.5))
    levels = {note.path: note.level for note in resolved.notes}
    assert levels["kv_cache_config.use_uvm"] == "warning"
    assert levels["kv_cache_config.max_util_for_resume"] == "debug"
    assert "kv_cache_config" not in levels


def test_derived_values_travel_between_processes() -> None:
    args = made(cp_config={"cp_size": 4}, kv_cache_config={"block_reuse_config": {"policy": "per_conversation"}}).args
    assert type(args).model_validate(args.model_dump(mode="json", exclude_unset=True)) == args
