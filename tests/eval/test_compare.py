from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.eval.compare import compare_means, compare_perplexities, mcnemar, mean_interval
from headrace.eval.tasks import compare_tasks, task_items, task_metrics


def test_mcnemar_is_the_binomial() -> None:
    assert mcnemar(0, 0) == 1.0 and mcnemar(3, 3) == 1.0
    assert mcnemar(0, 6) == pytest.approx(2 / 64) and mcnemar(6, 0) == mcnemar(0, 6)
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 1024)


def test_yes_or_no_values() -> None:
    a = [1.0] * 50 + [0.0] * 50
    found = compare_means("em", a, [1.0] * 60 + [0.0] * 40)
    assert found.verdict == "better" and found.p_value == pytest.approx(2 / 2**10) and "McNemar" in found.method
    assert found.low <= found.difference <= found.high and found.difference == pytest.approx(0.1) and found.low > 0
    assert compare_means("em", a, [0.0] * 10 + a[10:]).verdict == "worse"
    same = compare_means("em", a, [0.0, *a[1:49], 1.0, *a[50:]])
    assert same.verdict == "no difference shown"


def test_other_values_by_bootstrap() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(0, 5, 300)
    b = a + rng.normal(0.5, 1, 300)  # paired: the difference is seen through a spread ten times as large
    found = compare_means("score", a.tolist(), b.tolist())
    assert found.verdict == "better" and found.p_value is None
    assert (found.low, found.high) == pytest.approx((0.5 - 1.96 / 300**0.5, 0.5 + 1.96 / 300**0.5), abs=0.08)
    assert compare_means("loss", a.tolist(), b.tolist(), more_is_better=False).verdict == "worse"
    noise = a + rng.normal(0, 1, 300)
    assert compare_means("score", a.tolist(), noise.tolist()).verdict == "no difference shown"
    low, high = mean_interval([0.0, 1.0] * 200)
    assert (low, high) == pytest.approx((0.45, 0.55), abs=0.01)


def test_perplexities_are_compared_as_a_ratio_of_weighted_means() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(5, 50, 200)
    a = -2.0 * counts + rng.normal(0, 5, 200)
    found = compare_perplexities(a.tolist(), (a - 0.02 * counts).tolist(), counts.tolist())
    assert found.verdict == "worse" and found.difference == pytest.approx(math.expm1(0.02))
    assert found.low == pytest.approx(found.high) and found.b / found.a - 1 == pytest.approx(found.difference)
    assert compare_perplexities(a.tolist(), a.tolist(), counts.tolist()).verdict == "no difference shown"


def test_results_of_lm_eval_are_paired_by_document() -> None:
    def result(*values: float) -> dict[str, object]:
        samples = [{"doc_id": n, "filter": "none", "metrics": ["acc"], "acc": value} for n, value in enumerate(values)]
        return {
            "results": {"toy": {"alias": "toy", "acc,none": sum(values) / len(values), "acc_stderr,none": "N/A"}},
            "samples": {"toy": samples},
            "n-samples": {"toy": {"original": 9, "effective": len(values)}},
            "higher_is_better": {"toy": {"acc": True}},
        }

    a, b = result(*[0.0] * 8), result(*[1.0] * 8)
    assert [(m.name, m.value, m.num_items) for m in task_metrics(b)] == [("toy/acc", 1.0, 8)]
    assert task_items(a)[0]["values"] == {"acc": 0.0}
    (found,) = compare_tasks(a, b)
    assert (found.metric, found.verdict, found.num_items) == ("toy/acc", "better", 8)


def test_few_items_have_no_verdict() -> None:
    """A single window that got worse has an interval of one point, which says nothing."""
    one = compare_perplexities([-100.0], [-130.0], [50])
    assert one.verdict == "no difference shown" and "too few" in one.method and one.difference > 0.5
    assert compare_perplexities([-100.0] * 6, [-130.0] * 6, [50] * 6).verdict == "worse"
    assert compare_means("score", [0.1, 0.2], [0.5, 0.6]).verdict == "no difference shown"
