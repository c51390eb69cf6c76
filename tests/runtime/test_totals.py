"""The numbers of a running loop that metrics are made of."""

from __future__ import annotations

from headrace import wire

from .test_loop_cache import KV, PROMPT, Asking


def numbers(front: Asking) -> tuple[dict[str, float], dict[str, float]]:
    """Gauges and counters; those with a label under `name:value`."""
    told = front.ask(wire.GetMetrics())
    assert isinstance(told, wire.Metrics)
    gauges, counters = ({":".join([s.name, *s.labels.values()]): s.value for s in some}
                        for some in (told.gauges, told.counters))  # fmt: skip
    return gauges, counters


def test_blocks_are_used_cached_or_free() -> None:
    """What an ended request leaves behind is cached and not used, and everything adds up."""
    with Asking() as front:
        before, _ = numbers(front)
        total = KV["max_tokens"] // KV["tokens_per_block"]
        assert before["kv_cache_free_blocks"] == before["kv_cache_max_blocks"] == total
        front.run(1, max_tokens=4)
        after, counters = numbers(front)
        assert after["kv_cache_used_blocks"] == after["kv_cache_utilization"] == 0
        assert after["kv_cache_cached_blocks"] > 0
        parts = [after[f"kv_cache_{kind}_blocks"] for kind in ("used", "cached", "free")]
        assert sum(parts) == total
        assert counters["kv_cache_reused_blocks"] == 0
        front.run(2, max_tokens=4)
        again, counters = numbers(front)
        assert counters["kv_cache_reused_blocks"] > 0 and again["kv_cache_hit_rate"] > 0


def test_steps_and_requests_are_counted() -> None:
    with Asking() as front:
        front.run(1, max_tokens=5)
        front.run(2, prompt=[7] * 20, max_tokens=3)
        gauges, counters = numbers(front)
        assert counters["num_requests_admitted"] == counters["num_requests_completed"] == 2
        assert counters["step_tokens:context"] == len(PROMPT) + 20
        assert counters["step_tokens:generation"] >= 5 + 3
        assert counters["steps"] >= 8 and counters["num_requests_preempted"] == 0
        # Nothing runs: what the last step had is over.
        assert gauges["num_requests_running"] == gauges["scheduled_batch_size"] == 0
