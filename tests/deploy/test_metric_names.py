"""The exporter's names, kinds and labels against TensorRT-LLM's, so that dashboards made for it work."""

from __future__ import annotations

import pytest

from .exporter import families

COMMON = {"model_name", "engine_type"}

COUNTERS = """prompt_tokens generation_tokens prompt_cached_tokens num_requests_completed kv_cache_reused_blocks
    kv_cache_missed_blocks kv_cache_iter_reused_blocks kv_cache_iter_full_reused_blocks
    kv_cache_iter_partial_reused_blocks kv_cache_iter_missed_blocks kv_cache_gen_alloc_blocks kv_cache_onboard_bytes
    kv_cache_offload_bytes kv_cache_intra_device_copy_bytes kv_cache_disk_prefetch_blocks"""
HISTOGRAMS = """e2e_request_latency_seconds request_queue_time_seconds request_decode_time_seconds
    request_inference_time_seconds time_to_first_token_seconds time_per_output_token_seconds
    request_prefill_time_seconds prompt_cached_tokens_per_request prefill_perplexity generation_perplexity
    prefill_batch_tokens"""
GAUGES = """kv_cache_max_blocks kv_cache_hit_rate kv_cache_utilization kv_cache_host_utilization
    kv_cache_iter_reuse_rate kv_cache_free_blocks kv_cache_used_blocks kv_cache_tokens_per_block num_requests_running
    num_requests_waiting max_num_active_requests num_context_requests num_generation_requests num_paused_requests
    num_scheduled_requests total_context_tokens avg_decoded_tokens_per_iter iteration_latency_seconds
    gpu_memory_usage_bytes cpu_memory_usage_bytes pinned_memory_usage_bytes max_batch_size_static max_batch_size_runtime
    max_num_tokens_runtime prefill_batch_occupancy scheduled_batch_size"""
INFOS = {
    "model_config_info": "model served_model_name dtype quantization max_model_len gpu_type",
    "parallel_config_info": "tensor_parallel_size pipeline_parallel_size context_parallel_size gpu_count"
    " expert_parallel_size",
    "speculative_config_info": "spec_enabled spec_method spec_num_tokens spec_draft_model",
    "kv_cache_config_info": "page_size enable_block_reuse enable_partial_reuse free_gpu_memory_fraction cache_dtype",
}
WITH_SPECULATION = """spec_decode_drafted_tokens spec_decode_accepted_tokens spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_acceptance_length spec_decode_draft_overhead"""
OURS = """requests_accepted engine_stalls engine_ready engine_stalled steps step_seconds eager_fallbacks
    num_requests_admitted num_requests_preempted num_tokens_waiting queue_oldest_seconds grammar_compile_seconds
    kv_cache_cached_blocks kv_cache_pinned_blocks kv_cache_disk_write_bytes kv_cache_disk_read_bytes
    kv_cache_evicted_blocks kv_cache_failed_transfers requests request_abort step_tokens"""
SECONDS = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
PERPLEXITIES = "1 2 5 10 25 50 100 500 1000"
BUCKETS = {
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "request_inference_time_seconds": SECONDS,
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
    "time_per_output_token_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "request_prefill_time_seconds": ".001 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10 20 40 80 160 640 2560",
    "prompt_cached_tokens_per_request": "0 64 128 256 512 1024 2048 4096 8192",
    "prefill_perplexity": PERPLEXITIES,
    "generation_perplexity": PERPLEXITIES,
    "prefill_batch_tokens": "64 128 256 512 1024 2048 4096 8192 16384 32768",
}
LABELS = {
    "request_success": "finished_reason",
    "request_error": "http_code",
    "prompt_cache_hit_tokens": "cache_level cache_tier",
    "requests": "finish_reason",
    "request_abort": "reason",
    "step_tokens": "kind",
    **INFOS,
}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("counter", COUNTERS + " request_success request_error prompt_cache_hit_tokens"),
        ("histogram", HISTOGRAMS),
        ("gauge", " ".join([GAUGES, *INFOS])),
    ],
)
def test_the_reference_has_them(metrics_text: str, kind: str, names: str) -> None:
    found = families(metrics_text)
    for name in names.split():
        family = found.get(f"trtllm_{name}")
        assert family is not None and family.type == kind, name
        assert name not in INFOS or [sample.value for sample in family.samples] == [1]


@pytest.mark.parametrize("name", HISTOGRAMS.split())
def test_buckets_are_the_reference_s(metrics_text: str, name: str) -> None:
    samples = families(metrics_text)[f"trtllm_{name}"].samples
    bounds = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
    assert bounds == [*map(float, BUCKETS[name].split()), float("inf")]


def test_labels(metrics_text: str) -> None:
    for name, family in families(metrics_text).items():
        wanted = set(LABELS.get(name.removeprefix("trtllm_"), "").split()) | COMMON
        assert all(set(sample.labels) - {"le"} == wanted for sample in family.samples), name


def test_ours_are_all_that_is_more(metrics_text: str) -> None:
    """A name that is in none of these tables is a mistake in one of two places."""
    known = {*COUNTERS.split(), *HISTOGRAMS.split(), *GAUGES.split(), *INFOS, *OURS.split(), *LABELS}
    assert {name.removeprefix("trtllm_") for name in families(metrics_text)} == known
    assert not known & set(WITH_SPECULATION.split()), "these come with speculation"


def test_what_they_say_is_told(metrics_text: str) -> None:
    for name, family in families(metrics_text).items():
        said = family.documentation
        assert said.endswith(".") and said != "Not described.", name
        assert said.rstrip(".").lower() != name.removeprefix("trtllm_").replace("_", " "), f"{name}: only its name"
