"""lm-eval's result as metrics, items and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.eval.compare import Comparison, compare_means
from headrace.eval.result import Metric

__all__ = ["compare_tasks", "task_items", "task_metrics"]


def task_metrics(found: Mapping[str, Any]) -> list[Metric]:
    """Every number of `results`, named `task/metric`; the filter is in the name unless it is `none`."""
    return [
        Metric(name=f"{task}/{_name(key)}", value=float(value), num_items=_num_items(found, task))
        for task, values in found["results"].items()
        for key, value in values.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    ]


def task_items(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each item, filter and task: its values, and what the model gave."""
    return [
        {"task": task, "doc_id": sample["doc_id"], "filter": sample.get("filter", "none"),
         "values": dict(_numbers(sample)), "responses": sample.get("filtered_resps")}
        for task, samples in found.get("samples", {}).items()
        for sample in samples
    ]  # fmt: skip


def compare_tasks(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Comparison]:
    """By task, filter and metric, over the items that both have."""
    better = {(task, metric): bool(value) for task, values in a.get("higher_is_better", {}).items()
              for metric, value in (values or {}).items()}  # fmt: skip
    before, after = _by_metric(a), _by_metric(b)
    comparisons: list[Comparison] = []
    for (task, chosen, metric), values in before.items():
        others = after.get((task, chosen, metric), {})
        shared = [key for key in values if key in others]
        if shared:
            name = f"{task}/{metric}" if chosen == "none" else f"{task}/{metric} ({chosen})"
            one, other = [values[key] for key in shared], [others[key] for key in shared]
            comparisons.append(compare_means(name, one, other, more_is_better=better.get((task, metric), True)))
    return comparisons


def _by_metric(found: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[Any, float]]:
    """(task, filter, metric) -> value of each item by its number."""
    values: dict[tuple[str, str, str], dict[Any, float]] = {}
    for task, samples in found.get("samples", {}).items():
        for sample in samples:
            for metric, value in _numbers(sample):
                values.setdefault((task, sample.get("filter", "none"), metric), {})[sample["doc_id"]] = value
    return values


def _numbers(sample: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """An item's metrics; `word_perplexity` and its like are pairs of a log-likelihood and a weight."""
    for metric in sample.get("metrics", ()):
        value = sample.get(metric)
        if isinstance(value, list | tuple) and len(value) == 2 and value[1]:
            value = value[0] / value[1]
            metric = f"{metric} (log-likelihood)"
        if isinstance(value, bool | int | float):
            yield metric, float(value)


def _num_items(found: Mapping[str, Any], task: str) -> int:
    counts = found.get("n-samples", {}).get(task, {})
    return int(counts.get("effective", len(found.get("samples", {}).get(task, ()))))


def _name(key: str) -> str:
    metric, _, chosen = key.partition(",")
    return metric if chosen == "none" else f"{metric} ({chosen})"
