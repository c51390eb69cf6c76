"""Every YAML block of the documents that describe the system, as a file of a user who moves over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.config.disagg import is_disagg, load_disagg
from headrace.config.errors import ConfigError
from headrace.config.resolution import resolve
from headrace.config.source import read_document

WINDOWS = "kv_cache_config:\n  max_attention_window: [4096, 256]\n"
KV_CACHE = """
kv_cache_config:
  enable_block_reuse: false          # no prefix caching
  free_gpu_memory_fraction: 0.75
  dtype: auto
  tokens_per_block: 64
  mamba_ssm_cache_dtype: auto
  mamba_state_config:
    periodic_snapshot_interval: 0
"""
GRAPHS = "cuda_graph_config:\n  enable_padding: true\n  max_batch_size: 128\n"
MOE = "moe_config:\n  backend: DEEPGEMM\n  max_num_tokens: 33024\n  use_low_precision_moe_combine: true\n"
MTP = "speculative_config:\n  decoding_type: MTP\n  num_nextn_predict_layers: 1\n  max_draft_len: 3\n"
TRANSFER = "cache_transceiver_config:\n  backend: NIXL\n"
ORCHESTRATOR = """
# disagg_config.yaml
hostname: localhost
port: 8000
context_servers:
  num_instances: 1
  urls:
    - "localhost:8001"
generation_servers:
  num_instances: 1
  urls:
    - "localhost:8002"
"""
WIDE_ATTENTION = "tensor_parallel_size: 16\nenable_attention_dp: true\nmoe_expert_parallel_size: 16\n"
COMMENTS_ONLY = "# 544 slots; repeated ids are copies\n# layer_updates_per_iter: 0\n"
GLM_FP8 = """
cuda_graph_config:
  enable_padding: true
  max_batch_size: 128
enable_attention_dp: false
enable_chunked_prefill: true
kv_cache_config:
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.75
dtype: fp8
stream_interval: 10
moe_config:
  backend: DEEPGEMM
"""
GLM_MTP = """
cuda_graph_config:
  enable_padding: true
  max_batch_size: 128
enable_attention_dp: false
enable_chunked_prefill: true
kv_cache_config:
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.75
dtype: auto
speculative_config:
  decoding_type: MTP
  num_nextn_predict_layers: 1
stream_interval: 10
moe_config:
  backend: DEEPGEMM
"""
GLM_NVFP4 = "moe_config:\n  backend: TRTLLM\n"
KIMI = """
tensor_parallel_size: 16
enable_attention_dp: true
moe_expert_parallel_size: 16
max_batch_size: 32
max_num_tokens: 8192
max_seq_len: 8192
trust_remote_code: true
disable_overlap_scheduler: false
enable_chunked_prefill: true
cuda_graph_config:
  enable_padding: true
  max_batch_size: 32
moe_config:
  max_num_tokens: 33024
  use_low_precision_moe_combine: true
kv_cache_config:
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.25
  tokens_per_block: 64
"""
KIMI_REUSE = """
kv_cache_config:
  enable_block_reuse: true
  mamba_state_config:
    periodic_snapshot_interval: 256
"""
MINIMAX = """
cuda_graph_config:
  enable_padding: true
  max_batch_size: 64
enable_chunked_prefill: true
kv_cache_config:
  free_gpu_memory_fraction: 0.7
moe_config:
  backend: TRTLLM
"""
GPT_OSS = """
cuda_graph_config:
  enable_padding: true
  max_batch_size: 128
kv_cache_config:
  free_gpu_memory_fraction: 0.8
moe_config:
  backend: TRTLLM
"""
LOW_LATENCY = """
max_batch_size: 16 or 32
max_num_tokens: 3072
cuda_graph_config:
  max_batch_size: 16 or 32
kv_cache_config:
  free_gpu_memory_fraction: 0.6
speculative_config:
  decoding_type: MTP
  max_draft_len: 3
"""
HIGH_THROUGHPUT = """
max_batch_size: 512 or 1024
max_num_tokens: 8192
cuda_graph_config:
  enable_padding: true
  max_batch_size: <same as above>
kv_cache_config:
  free_gpu_memory_fraction: 0.85
enable_attention_dp: true
moe_expert_parallel_size: <large>
"""
FP8_CACHE = "kv_cache_config:\n  dtype: fp8\n"
NVFP4_CACHE = "kv_cache_config:\n  dtype: nvfp4\n"
RAY = "orchestrator_type: ray\n"
CONTEXT_PARALLEL = "cp_config:\n  cp_size: 4\n"
TABLE = """
pipeline_parallel_size: 2
kv_cache_config:
  host_cache_size: 48318382080
  secondary_offload_min_priority: 35
  use_kv_cache_manager_v2: true
  event_buffer_max_size: 1024
  iteration_stats_interval: 1
  sink_token_length: 4
scheduler_config:
  capacity_scheduler_policy: MAX_UTILIZATION
  context_chunking_policy: EQUAL_PROGRESS
  dynamic_batch_config: {}
cuda_graph_config:
  batch_sizes: [192, 256, 2048]
"""

MTP_REFUSED = {"speculative_config"}
ATTENTION_DP = {"enable_attention_dp", "moe_expert_parallel_size"}
BLOCKS = {
    "windows": (WINDOWS, set[str]()),
    "kv_cache": (KV_CACHE, set[str]()),
    "graphs": (GRAPHS, set[str]()),
    "moe": (MOE, set[str]()),
    "mtp": (MTP, MTP_REFUSED),
    "transfer": (TRANSFER, {"cache_transceiver_config.backend"}),
    "orchestrator": (ORCHESTRATOR, {"context_servers"}),
    "wide_attention": (WIDE_ATTENTION, ATTENTION_DP),
    "comments_only": (COMMENTS_ONLY, set[str]()),
    "glm_fp8": (GLM_FP8, {"dtype"}),
    "glm_mtp": (GLM_MTP, MTP_REFUSED),
    "glm_nvfp4": (GLM_NVFP4, set[str]()),
    "kimi": (KIMI, ATTENTION_DP),
    "kimi_reuse": (KIMI_REUSE, set[str]()),
    "minimax": (MINIMAX, set[str]()),
    "gpt_oss": (GPT_OSS, set[str]()),
    "low_latency_16": (LOW_LATENCY.replace("16 or 32", "16"), MTP_REFUSED),
    "low_latency_32": (LOW_LATENCY.replace("16 or 32", "32"), MTP_REFUSED),
    "high_throughput": (
        HIGH_THROUGHPUT.replace("512 or 1024", "512").replace("<same as above>", "512").replace("<large>", "1"),
        {"enable_attention_dp"},
    ),
    "fp8_cache": (FP8_CACHE, set()),
    "nvfp4_cache": (NVFP4_CACHE, {"kv_cache_config.dtype"}),
    "ray": (RAY, {"orchestrator_type"}),
    "context_parallel": (CONTEXT_PARALLEL, {"cp_config"}),
    "table": (
        TABLE,
        {
            "pipeline_parallel_size",
        },
    ),
}
"""Block -> the keys it is refused for, each naming a feature that is not built yet."""


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_resolves_or_names_what_is_missing(name: str, tmp_path: Path) -> None:
    text, refused = BLOCKS[name]
    file = tmp_path / "config.yml"
    file.write_text(text)
    if not refused:
        resolve(config=file, needs_model=False, for_this_machine=False)
        return
    with pytest.raises(ConfigError) as caught:
        if is_disagg(read_document(file)):
            load_disagg(file)
        else:
            resolve(config=file, needs_model=False, for_this_machine=False)
    assert {problem.path for problem in caught.value.problems} == refused
    for problem in caught.value.problems:
        assert "not available yet (" in problem.message
        assert problem.source.startswith(f"{file}:")


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_valid_once_all_is_built(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(BLOCKS[name][0])
    if is_disagg(read_document(file)):
        assert load_disagg(file, refuse_missing_features=False).context_servers is not None
    else:
        resolve(config=file, needs_model=False, refuse_missing_features=False, for_this_machine=False)


def test_placeholders_are_bad_values_not_unknown_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(LOW_LATENCY)
    with pytest.raises(ConfigError) as caught:
        resolve(config=file, needs_model=False)
    assert {problem.path for problem in caught.value.problems} == {"max_batch_size", "cuda_graph_config.max_batch_size"}
    assert all("expected a whole number, got '16 or 32'" in problem.message for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("short", "key"),
    [
        ("moe_tp", "moe_tensor_parallel_size"),
        ("moe_ep", "moe_expert_parallel_size"),
        ("attention_dp", "enable_attention_dp"),
    ],
)
def test_abbreviations_of_the_drawings_are_explained(short: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(f"{short}: 1\n")
    with pytest.raises(ConfigError, match=re.escape(f"{short}: unknown key, did you mean '{key}'?")):
        resolve(config=file, needs_model=False)
