"""The metrics of a server, by series."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(name, labels but for those that all have) -> value"""
COMMON = ("model_name", "engine_type")
PHASES = ("queue", "prefill", "decode", "inference")


def series_of(text: str) -> Series:
    """The page at /metrics."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset((key, label) for key, label in sample.labels.items() if key not in COMMON)
            assert (sample.name, labels) not in found, "a series appears once"
            found[sample.name, labels] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"trtllm_{name}", frozenset(labels.items())]


def phases_ms(url: str) -> dict[str, float]:
    """Of all requests that have ended together; inference is prefill and decode."""
    series = series_of(httpx.get(f"{url}/metrics").text)
    return {name: 1000 * value(series, f"request_{name}_time_seconds_sum") for name in PHASES}
