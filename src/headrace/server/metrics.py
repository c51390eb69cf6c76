"""The server's metrics in Prometheus' form: what requests went through here, and what the runtime tells of itself.

Names, labels and buckets are TensorRT-LLM's (prefix `trtllm_`), so that dashboards made for it work. With several
server processes, prometheus-client adds them up through files in a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from headrace import env, wire

__all__ = ["ABORTS", "Infos", "Metrics"]

PREFIX = "trtllm_"
ENGINE_TYPE = "pytorch"

FINISHES = ("stop", "length", "abort", "timeout", "error")
ABORTS = ("disconnected", "requested", "shutting_down", "other")
ERROR_CODES = ("400", "401", "404", "405", "408", "413", "415", "429", "500", "503", "504")

COUNTERS = {
    "requests_accepted": "Requests that were taken; each choice of each prompt is one.",
    "engine_stalls": "Times that running requests got no step for stall_timeout_s.",
    "prompt_tokens": "Prompt tokens of ended requests.",
    "generation_tokens": "Generated tokens of ended requests.",
    "prompt_cached_tokens": "Prompt tokens of ended requests that were found in the cache.",
}
BY_LABEL = {
    "request_success": ("finished_reason", FINISHES[:2], "Requests that ended by themselves."),
    "requests": ("finish_reason", FINISHES, "Requests that ended."),
    "request_abort": ("reason", ABORTS, "Requests that were ended from outside."),
    "request_error": ("http_code", ERROR_CODES, "Answers with an error; those of health checks are not among them."),
}
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST_TOKEN = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
]  # fmt: skip
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
PREFILL = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560]
CACHED = [0, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
PERPLEXITY = [1, 2, 5, 10, 25, 50, 100, 500, 1000]
HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (FIRST_TOKEN, "From arrival to the first token."),
    "time_per_output_token_seconds": (PER_TOKEN, "Between two tokens of a request, on average."),
    "e2e_request_latency_seconds": (LATENCY, "From arrival to the end."),
    "request_queue_time_seconds": (LATENCY, "From arrival to the first step."),
    "request_prefill_time_seconds": (PREFILL, "From the first step to the first token."),
    "request_decode_time_seconds": (LATENCY, "From the first token to the last."),
    "request_inference_time_seconds": (LATENCY, "From the first step to the last token."),
    "prompt_cached_tokens_per_request": (CACHED, "Prompt tokens of a request that were found in the cache."),
    "prefill_perplexity": (PERPLEXITY, "Of prompts whose log-probabilities were asked for."),
    "generation_perplexity": (PERPLEXITY, "Of outputs whose log-probabilities were asked for."),
}

HELP = {
    "engine_ready": "1 while requests are answered; 0 while it loads, drains, has stalled or has failed.",
    "engine_stalled": "1 while requests run and no step has ended for stall_timeout_s.",
    "gpu_memory_usage_bytes": "What the engine has taken of each device's memory, as planned at start.",
    "cpu_memory_usage_bytes": "Memory that the runtime's process has resident.",
    "pinned_memory_usage_bytes": "Host memory for KV blocks that a device copies to and from.",
    "model_config_info": "1; the labels tell the model.",
    "parallel_config_info": "1; the labels tell the ranks.",
    "speculative_config_info": "1; the labels tell how tokens are drafted.",
    "kv_cache_config_info": "1; the labels tell the settings of the KV cache.",
    "num_requests_running": "Sequences that have a slot of the engine.",
    "num_requests_waiting": "Sequences that wait for their first step, or to go on after a pause.",
    "num_tokens_waiting": "Prompt tokens of requests that wait for their first step.",
    "queue_oldest_seconds": "How long the one has waited that came first of those that wait.",
    "max_num_active_requests": "Most sequences that may run at once.",
    "num_context_requests": "Sequences of the last step whose prompts it computed; 0 at rest.",
    "num_generation_requests": "Sequences of the last step that it gave tokens; 0 at rest.",
    "num_paused_requests": "Sequences that the last step paused for want of blocks; 0 at rest.",
    "num_scheduled_requests": "Sequences of the last step; 0 at rest.",
    "scheduled_batch_size": "Sequences of the last step; 0 at rest.",
    "total_context_tokens": "Prompt tokens that the last step computed; 0 at rest.",
    "avg_decoded_tokens_per_iter": "Tokens that the last step generated, per sequence; 0 at rest.",
    "prefill_batch_occupancy": "Prompt tokens of the last step as a share of max_num_tokens; 0 at rest.",
    "iteration_latency_seconds": "Time of the last step.",
    "max_batch_size_static": "max_batch_size, as it was set.",
    "max_batch_size_runtime": "Most sequences in a step now.",
    "max_num_tokens_runtime": "Most tokens computed in a step now.",
    "kv_cache_hit_rate": "Share of prompt tokens that were found, since the start.",
    "kv_cache_iter_reuse_rate": "Share of their blocks that the latest admitted prompts found.",
    "kv_cache_utilization": "Share of the device's blocks that requests hold.",
    "kv_cache_host_utilization": "Share of the host tier's blocks that hold something.",
    "kv_cache_max_blocks": "Blocks of the device.",
    "kv_cache_used_blocks": "Device blocks that requests or copies hold.",
    "kv_cache_cached_blocks": "Device blocks that nobody holds and that a prefix may find.",
    "kv_cache_free_blocks": "Device blocks with nothing in them.",
    "kv_cache_pinned_blocks": "Device blocks that pins keep.",
    "kv_cache_tokens_per_block": "Tokens that a block has room for.",
    "steps": "Steps of the engine.",
    "step_seconds": "Time that steps took.",
    "step_tokens": "Tokens computed in steps.",
    "eager_fallbacks": "Steps of generation only that ran without a CUDA graph although graphs are on.",
    "num_requests_completed": "Sequences that the engine has finished by itself.",
    "num_requests_admitted": "Sequences that were given a slot.",
    "num_requests_preempted": "Requests that were paused for want of blocks.",
    "kv_cache_reused_blocks": "Blocks of admitted prompts that were found.",
    "kv_cache_missed_blocks": "Blocks of admitted prompts that had to be computed.",
    "kv_cache_iter_reused_blocks": "The same as kv_cache_reused_blocks, under the name of the iteration statistics.",
    "kv_cache_iter_full_reused_blocks": "Those of the reused blocks that were found whole.",
    "kv_cache_iter_partial_reused_blocks": "Those of the reused blocks of which a part was found.",
    "kv_cache_iter_missed_blocks": "The same as kv_cache_missed_blocks, under the name of the iteration statistics.",
    "kv_cache_gen_alloc_blocks": "Blocks that were taken for generated tokens.",
    "kv_cache_onboard_bytes": "Bytes of blocks copied from the host to the device.",
    "kv_cache_offload_bytes": "Bytes of blocks copied from the device to the host.",
    "kv_cache_intra_device_copy_bytes": "Bytes of blocks copied on the device, where one is shared in part.",
    "kv_cache_disk_prefetch_blocks": "Blocks read from the disk before their requests were admitted.",
    "kv_cache_disk_write_bytes": "Bytes of blocks written to the disk tier.",
    "kv_cache_disk_read_bytes": "Bytes of blocks read from the disk tier.",
    "kv_cache_evicted_blocks": "Cached blocks that made room for others.",
    "kv_cache_failed_transfers": "Copies of blocks between tiers that failed.",
    "prompt_cache_hit_tokens": "Prompt tokens that admitted sequences found, by the tier they were on.",
    "prefill_batch_tokens": "Prompt tokens of a step that computed any.",
    "grammar_compile_seconds": "Time to compile the grammar of a request.",
}


disable_created_metrics()  # a series more for each one, which nobody reads


class Metrics:
    """What requests did, counted where they end; written by several threads."""

    def __init__(self, model_name: str, *, buckets: Mapping[str, Sequence[float] | None] | None = None) -> None:
        """`buckets`: upper bounds by the keys of `prometheus_metrics_config`."""
        self.labels = {"model_name": model_name, "engine_type": ENGINE_TYPE}
        self._registry = CollectorRegistry()
        self._buckets = dict(buckets or {})
        self.counters = {name: self._family(name, text).labels(**self.labels) for name, text in COUNTERS.items()}
        self.histograms = {name: self._histogram(name, bounds, text) for name, (bounds, text) in HISTOGRAMS.items()}
        self._families = {name: self._family(name, text, label) for name, (label, _, text) in BY_LABEL.items()}
        # All values from the start: a rate is right from the first one counted.
        self._by_label = {
            (name, value): self._families[name].labels(**self.labels, **{label: value})
            for name, (label, values, _) in BY_LABEL.items()
            for value in values
        }

    def count(self, name: str, value: str) -> None:
        """One more of a counter of `BY_LABEL`."""
        counter = self._by_label.get((name, value))
        if counter is None:
            label = BY_LABEL[name][0]
            counter = self._by_label[name, value] = self._families[name].labels(**self.labels, **{label: value})
        counter.inc()

    def render(self, runtime: wire.Metrics | None, gauges: Mapping[str, float], infos: Infos) -> bytes:
        """The text of all series: of every server process, of the runtime, and `gauges` of this process."""
        registry = self._registry
        if env.metrics_folder():
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        told = CollectorRegistry()
        told.register(_Told(self.labels, runtime or wire.Metrics(), gauges, infos))
        return generate_latest(registry) + generate_latest(told)

    def _family(self, name: str, text: str, *more: str) -> Counter:
        return Counter(PREFIX + name, text, [*self.labels, *more], registry=self._registry)

    def _histogram(self, name: str, bounds: Sequence[float], text: str) -> Histogram:
        own = self._buckets.get(f"{name.removesuffix('_seconds')}_buckets") or bounds
        family = Histogram(PREFIX + name, text, list(self.labels), buckets=own, registry=self._registry)
        return family.labels(**self.labels)


Infos = Mapping[str, Mapping[str, Any]]
"""By name of an info series, its labels."""


class _Told:
    """A collector over values that somebody else keeps."""

    def __init__(
        self, labels: Mapping[str, str], runtime: wire.Metrics, gauges: Mapping[str, float], infos: Infos
    ) -> None:
        self._labels = labels
        self._runtime = runtime
        self._gauges = gauges
        self._infos = infos

    def collect(self) -> Iterable[Metric]:
        own = [wire.Sample(name, value) for name, value in self._gauges.items()]
        own += [
            wire.Sample(name, 1.0, {key: str(value) for key, value in labels.items()})
            for name, labels in self._infos.items()
        ]
        yield from self._families(GaugeMetricFamily, [*own, *self._runtime.gauges])
        yield from self._families(CounterMetricFamily, self._runtime.counters)
        for each in self._runtime.distributions:
            yield self._histogram(each)

    def _families(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], samples: Iterable[wire.Sample]
    ) -> Iterable[Metric]:
        families: dict[str, Any] = {}
        for sample in samples:
            names = [*self._labels, *sample.labels]
            family = families.get(sample.name)
            if family is None:
                family = families[sample.name] = kind(PREFIX + sample.name, _help(sample.name), labels=names)
            family.add_metric([*self._labels.values(), *sample.labels.values()], sample.value)
        return families.values()

    def _histogram(self, told: wire.Distribution) -> Metric:
        family = HistogramMetricFamily(PREFIX + told.name, _help(told.name), labels=list(self._labels))
        buckets: list[tuple[str, float]] = []
        so_far = 0
        for bound, count in zip([*map(str, told.bounds), "+Inf"], told.counts):
            so_far += count
            buckets.append((bound, so_far))
        family.add_metric(list(self._labels.values()), buckets, told.total)
        return family


def _help(name: str) -> str:
    return HELP.get(name, "Not described.")
