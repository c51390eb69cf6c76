"""Rules inside single classes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import (
    CacheTransceiverConfig,
    CpConfig,
    CudaGraphConfig,
    DisaggClusterConfig,
    EncodeCudaGraphConfig,
    KvCacheConfig,
    KvCacheConnectorConfig,
    KvCacheRetentionConfig,
    LayerwiseBenchmarksConfig,
    LlmArgs,
    MoeConfig,
    MultimodalConfig,
    PeftCacheConfig,
    PrometheusMetricsConfig,
    SchedulerConfig,
    SleepConfig,
    TokenRangeRetentionConfig,
)
from headrace.config.base import ConfigModel
from headrace.config.errors import ConfigError


def refused(cls: type[ConfigModel], **values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        cls(**values)
    return [problem.path for problem in caught.value.problems]


def test_kv_cache_defaults() -> None:
    cache = KvCacheConfig()
    assert (cache.enable_block_reuse, cache.tokens_per_block, cache.free_gpu_memory_fraction) == (True, 32, 0.9)
    assert (cache.max_tokens, cache.max_gpu_total_bytes, cache.host_cache_size) == (None, 0, None)
    assert (cache.enable_partial_reuse, cache.copy_on_partial_reuse, cache.dtype) == (True, True, "auto")
    assert (cache.max_util_for_resume, cache.use_kv_cache_manager_v2) == (0.95, "auto")
    assert cache.block_reuse_config.policy == "all_reusable"


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"tokens_per_block": 1}, "tokens_per_block"),
        ({"tokens_per_block": 24}, "tokens_per_block"),
        ({"free_gpu_memory_fraction": 1.1}, "free_gpu_memory_fraction"),
        ({"free_gpu_memory_fraction": -0.1}, "free_gpu_memory_fraction"),
        ({"max_attention_window": [4096, 0]}, "max_attention_window[1]"),
        ({"pool_ratio": [0.5, 0.4]}, "pool_ratio"),
        ({"pool_ratio": [1.5, -0.5]}, "pool_ratio"),
        ({"pool_ratio": []}, "pool_ratio"),
        ({"disk_cache_size": 1}, "disk_cache_path"),
        ({"dtype": "fp8_ds_mla", "enable_kv_pool_rebalance": True}, "enable_kv_pool_rebalance"),
        ({"use_kv_cache_manager_v2": False, "mamba_state_config": {"enable_branch_snapshot": True}},
         "use_kv_cache_manager_v2"),
        ({"mamba_state_cache_interval": 4, "mamba_state_config": {"periodic_snapshot_interval": 4}},
         "mamba_state_cache_interval"),
        ({"secondary_offload_min_priority": 101}, "secondary_offload_min_priority"),
    ],
)  # fmt: skip
def test_kv_cache_refuses(values: dict[str, Any], path: str) -> None:
    assert refused(KvCacheConfig, **values) == [path]


def test_old_snapshot_interval_moves_to_its_new_place() -> None:
    cache = KvCacheConfig(mamba_state_cache_interval=256)
    assert cache.mamba_state_config.periodic_snapshot_interval == 256
    assert cache.mamba_state_cache_interval is None


def test_retention_takes_values_by_position() -> None:
    ranges = [TokenRangeRetentionConfig(0, 30, 100, None), TokenRangeRetentionConfig(30, None, 20, 5000)]
    config = KvCacheRetentionConfig(token_range_retention_configs=ranges, decode_retention_priority=10)
    assert config.token_range_retention_configs[1].duration_ms == 5000
    assert refused(TokenRangeRetentionConfig, token_start=5, token_end=5, priority=3) == ["token_end"]
    assert refused(TokenRangeRetentionConfig, token_start=5, priority=101) == ["priority"]


def test_names_of_policies_in_any_case() -> None:
    policy = SchedulerConfig(capacity_scheduler_policy="max_utilization", waiting_queue_policy="PRIORITY")
    assert str(policy.capacity_scheduler_policy) == "MAX_UTILIZATION"
    assert policy.waiting_queue_policy.value == "priority"
    assert CpConfig(cp_type="helix").cp_type == "HELIX"


def test_capture_sizes_of_graphs() -> None:
    assert CudaGraphConfig().capture_sizes() == [*range(1, 32), 32, 64, 128]
    assert CudaGraphConfig(max_batch_size=100).capture_sizes() == [*range(1, 32), 32, 64, 100]
    assert CudaGraphConfig(enable_padding=True).capture_sizes() == [1, 2, 4, *range(8, 129, 8)]
    padded = CudaGraphConfig(enable_padding=True, max_batch_size=2048).capture_sizes()
    assert padded[-3:] == [1920, 1984, 2048]
    assert len(padded) == 49
    assert CudaGraphConfig(max_batch_size=5).capture_sizes() == [1, 2, 3, 4, 5]


def test_listed_graph_sizes_set_their_maximum() -> None:
    config = CudaGraphConfig(batch_sizes=[8, 1, 4, 4])
    assert (config.batch_sizes, config.max_batch_size) == ([1, 4, 8], 8)
    assert config.capture_sizes() == [1, 4, 8]
    assert refused(CudaGraphConfig, batch_sizes=[1, 8], max_batch_size=16) == ["max_batch_size"]
    assert refused(EncodeCudaGraphConfig, num_tokens=[8], max_num_token=9) == ["max_num_token"]
    assert refused(EncodeCudaGraphConfig, seq_lens=[8], max_seq_len=9) == ["max_seq_len"]


def test_kind_of_graphs_follows_the_keys() -> None:
    assert isinstance(LlmArgs(cuda_graph_config={"seq_lens": [16]}).cuda_graph_config, EncodeCudaGraphConfig)
    assert isinstance(LlmArgs(cuda_graph_config={"mode": "encode"}).cuda_graph_config, EncodeCudaGraphConfig)
    assert isinstance(LlmArgs(cuda_graph_config={}).cuda_graph_config, CudaGraphConfig)
    assert LlmArgs(cuda_graph_config=None).cuda_graph_config is None


def test_experts() -> None:
    assert MoeConfig(backend="deepgemm").backend.value == "DEEPGEMM"
    assert MoeConfig(load_balancer="placement.yaml").load_balancer == "placement.yaml"
    balanced = MoeConfig(load_balancer={"num_slots": 2, "initial_global_assignments": {0: [1, 1]}})
    assert balanced.load_balancer is not None
    path = "load_balancer.initial_global_assignments.0"
    assert refused(MoeConfig, load_balancer={"num_slots": 3, "initial_global_assignments": {0: [1]}}) == [path]


@pytest.mark.parametrize(
    ("text", "size"), [("512MB", 512_000_000), ("1GiB", 1 << 30), ("1.5k", 1500), (7, 7), ("7", 7)]
)
def test_sizes_as_text(text: Any, size: int) -> None:
    assert MultimodalConfig(encoder_cache_max_bytes=text).encoder_cache_max_bytes == size


def test_multimodal_refuses() -> None:
    assert refused(MultimodalConfig, encoder_cache_max_bytes="12 parsecs") == ["encoder_cache_max_bytes"]
    assert refused(MultimodalConfig, video_pruning_rate=1.0) == ["video_pruning_rate"]
    graphs = {"image": {"buckets": [[1024, 4]]}}
    assert MultimodalConfig(encoder_cuda_graph=graphs).encoder_cuda_graph is not None
    assert refused(MultimodalConfig, encoder_cuda_graph=graphs, encoder_side_stream_max_ahead=1) == [
        "encoder_side_stream_max_ahead"
    ]


def test_transfer_refuses() -> None:
    pipelined: dict[str, Any] = {"enable_pipelined_transfer": True}
    assert refused(CacheTransceiverConfig, **pipelined) == ["enable_pipelined_transfer"]
    assert refused(CacheTransceiverConfig, backend="UCX", **pipelined) == ["enable_pipelined_transfer"]
    assert refused(CacheTransceiverConfig, backend="NIXL", transceiver_runtime="cpp", **pipelined)
    assert refused(CacheTransceiverConfig, backend="NIXL", kv_cache_bounce_size_mb=8, **pipelined)
    assert CacheTransceiverConfig(backend="nixl", **pipelined).enable_pipelined_transfer
    assert refused(CacheTransceiverConfig, kv_transfer_timeout_ms=0) == ["kv_transfer_timeout_ms"]


def test_connectors_need_all_their_names() -> None:
    assert KvCacheConnectorConfig(connector="lmcache").connector == "lmcache"
    assert refused(KvCacheConnectorConfig, connector="memcached") == ["connector"]
    assert refused(KvCacheConnectorConfig, connector_module="m") == ["connector_scheduler_class"]
    full = {"connector_module": "m", "connector_scheduler_class": "S", "connector_worker_class": "W"}
    assert KvCacheConnectorConfig(**full).connector_worker_class == "W"


def test_sparse_attention_by_algorithm() -> None:
    args = LlmArgs(sparse_attention_config={"algorithm": "deepseek_v4", "compress_ratios": [0, 4]})
    assert args.sparse_attention_config is not None
    assert args.sparse_attention_config.__dict__["compress_ratios"] == [1, 4]
    both = {"algorithm": "skip_softmax", "target_sparsity": {"prefill": 0.5}, "threshold_scale_factor": 10}
    assert LlmArgs(sparse_attention_config=both).sparse_attention_config is not None
    path = "sparse_attention_config"
    assert refused(LlmArgs, sparse_attention_config={"algorithm": "guess"}) == [path]
    assert refused(LlmArgs, sparse_attention_config={"algorithm": "skip_softmax", "target_sparsity": 2}) == [
        f"{path}.target_sparsity"
    ]
    assert refused(LlmArgs, sparse_attention_config={"algorithm": "rocket", "topk": "x"}) == [f"{path}.topk"]


def test_compression_by_algorithm() -> None:
    args = LlmArgs(kv_cache_compression_config={"algorithm": "triattention", "calibration_path": "c"})
    assert args.kv_cache_compression_config is not None
    assert refused(LlmArgs, kv_cache_compression_config={"algorithm": "triattention"}) == [
        "kv_cache_compression_config.calibration_path"
    ]


def test_the_rest_refuses() -> None:
    assert refused(PeftCacheConfig, lora_prefetch_dir="d") == ["lora_prefetch_dir"]
    assert refused(PrometheusMetricsConfig, time_to_first_token_buckets=[1.0, 1.0]) == ["time_to_first_token_buckets"]
    assert refused(PrometheusMetricsConfig, time_to_first_token_buckets=[]) == ["time_to_first_token_buckets"]
    assert refused(SleepConfig, restore_modes={"gpu": "CPU"}) == ["restore_modes"]
    assert SleepConfig(restore_modes={"kv_cache": "NONE"}).restore_modes == {"kv_cache": "NONE"}
    assert refused(LayerwiseBenchmarksConfig, calibration_mode="COLLECT") == ["calibration_file_path"]
    assert refused(DisaggClusterConfig, cluster_uri="ftp://x") == ["cluster_uri"]
    assert refused(DisaggClusterConfig, cluster_uri="http://x", heartbeat_interval_sec=10) == ["inactive_timeout_sec"]
