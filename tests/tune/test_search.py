"""The search over a made-up bench: what is predicted worse isn't measured, what is measured is kept for later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bench.report import Lengths, Load, Point, Report, Result, Slo, Spread, Workload
from headrace.tune.judge import Goal
from headrace.tune.knobs import KNOBS, Asked
from headrace.tune.page import Measured, front_of
from headrace.tune.search import Bench, Search
from headrace.tune.store import Store

ASKED = Asked(most_requests=16, longest_prompt=100, tokens_per_block=32)


def point(speed: float, ttft_s: float) -> Point:
    spread = Spread(mean=ttft_s, min=ttft_s, p50=ttft_s, p90=ttft_s, p99=ttft_s, max=ttft_s, curve=[ttft_s] * 101)
    result = Result(
        duration_s=1.0, num_requests=4, num_done=4, first_errors=[], input_tokens=4, output_tokens=4, cached_tokens=0,
        num_steps=4, requests_per_s=4.0, output_tokens_per_s=speed, total_tokens_per_s=speed,
        output_tokens_per_s_per_gpu=speed, output_tokens_per_s_per_user=1.0, decode_tokens_per_s_per_user=100 / speed,
        mean_concurrency=1.0,
    )  # fmt: skip
    return Point(load=Load(pattern="closed", concurrency=4), result=result, latency={"ttft_s": spread, "tpot_s": None})


def world(settings: dict[str, Any]) -> Point:
    """A larger batch is faster and later."""
    batch = settings.get("max_batch_size", 8)
    return point(100.0 * batch, 0.1 * batch)


class Made:
    def __init__(self, batch_size: int = 8) -> None:
        self.batch_size = batch_size
        """As the user has it."""
        self.measured: list[dict[str, Any]] = []
        self.confirmed: list[dict[str, Any]] = []

    def measure(self, settings: dict[str, Any]) -> Report:
        self.measured.append(settings)
        return self.report([world({"max_batch_size": self.batch_size, **settings})])

    def confirm(self, settings: dict[str, Any]) -> Report:
        self.confirmed.append(settings)
        return self.report([world({"max_batch_size": self.batch_size, **settings})])

    def report(self, points: list[Point]) -> Report:
        one = Lengths(mean=1, min=1, max=1)
        workload = Workload(dataset="made up", seed=0, warmup=0, eos_id=-1, input_len=one, output_len=one)
        return Report(kind="throughput", date="", model={}, machine={}, num_gpus=1, settings={}, workload=workload,
                      points=points)  # fmt: skip

    def predict(self, settings: dict[str, Any], reports: Sequence[Report]) -> list[Point]:
        if settings.get("enable_chunked_prefill") is False:
            raise ValueError("enable_chunked_prefill: not with these prompts")
        return [world({"max_batch_size": self.batch_size, **settings})]

    def search(self, folder: Path, *, ttft_s: float, budget_s: float = 100.0) -> tuple[dict[str, Any], Store]:
        store = Store(folder, {"model": "m", "ttft": ttft_s})
        bench = Bench(
            measure=self.measure, confirm=self.confirm, confirms="server", predict=self.predict,
            current={"max_batch_size": self.batch_size}.get,
        )  # fmt: skip
        goal = Goal(slo=Slo(ttft_s=ttft_s), quantile=0.9)
        search = Search(bench, store, goal, budget_s=budget_s, max_per_knob=2, say=lambda line: None)
        return search.run(KNOBS, ASKED).settings, store


def test_the_fastest_within_the_limits_is_chosen_and_the_worse_is_not_measured(tmp_path: Path) -> None:
    made = Made()
    best, store = made.search(tmp_path / "wide", ttft_s=2.0)
    assert best == {"max_batch_size": 16} and made.measured == made.confirmed == [{}, {"max_batch_size": 16}]
    outcomes = {trial.settings["max_batch_size"]: trial.outcome for trial in store.journal.trials[1:3]}
    assert outcomes == {4: "pruned", 16: "measured"}
    assert "impossible" in {trial.outcome for trial in store.journal.trials}

    best, _ = Made().search(tmp_path / "narrow", ttft_s=0.5)
    assert best == {"max_batch_size": 4}


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second = Made(), Made()
    best, _ = first.search(tmp_path, ttft_s=2.0, budget_s=-1.0)
    assert best == {} and first.measured == [{}] and not first.confirmed
    best, _ = second.search(tmp_path, ttft_s=2.0)
    assert best == {"max_batch_size": 16} and second.measured == [{"max_batch_size": 16}]
    assert second.confirmed == [{}, {"max_batch_size": 16}]
    third = Made()
    assert third.search(tmp_path, ttft_s=2.0)[0] == best and not third.measured and not third.confirmed
    with pytest.raises(ValueError, match="choose another folder"):
        second.search(tmp_path, ttft_s=1.0)


class Lucky(Made):
    """The second measurement of the larger batch doesn't say what the first one did."""

    def confirm(self, settings: dict[str, Any]) -> Report:
        report = super().confirm(settings)
        if settings:
            return msgspec.structs.replace(report, points=[point(700.0, 0.1)])
        return report


def test_a_gain_that_does_not_hold_is_none(tmp_path: Path) -> None:
    lucky = Lucky()
    best, store = lucky.search(tmp_path, ttft_s=2.0)
    assert best == {} and lucky.measured == lucky.confirmed == [{}, {"max_batch_size": 16}]
    assert store.journal.best == len(store.journal.trials) - 2
    short = Lucky()
    best, _ = short.search(tmp_path / "short", ttft_s=2.0, budget_s=0.0)
    assert best == {} and short.measured == [{}]


class Served(Made):
    """Over HTTP every request is later, and what needs most memory may not even start."""

    is_broken = False

    def confirm(self, settings: dict[str, Any]) -> Report:
        self.confirmed.append(settings)
        batch = settings.get("max_batch_size", self.batch_size)
        if self.is_broken and batch == 16:
            raise RuntimeError("the server has ended")
        return self.report([point(90.0 * batch, 0.15 * batch)])


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_a_server_says_counts(tmp_path: Path, is_broken: bool) -> None:
    made = Served(batch_size=4)
    made.is_broken = is_broken
    best, store = made.search(tmp_path, ttft_s=2.0)
    assert made.measured == [{}, {"max_batch_size": 16}, {"max_batch_size": 8}]
    assert best == {"max_batch_size": 8} and made.confirmed == made.measured
    chosen = store.journal.trials[store.journal.best or 0]
    assert chosen.through == "server" and chosen.measured is not None
    assert (chosen.measured.output_tokens_per_s, chosen.measured.ttft_s) == (720.0, pytest.approx(1.2))
    outcomes = [trial.outcome for trial in store.journal.trials if trial.knob == "again"]
    assert outcomes == ["measured", "failed" if is_broken else "measured", "measured"]


def test_settings_as_given_are_told_as_a_server_has_them(tmp_path: Path) -> None:
    made = Served(batch_size=16)
    best, store = made.search(tmp_path, ttft_s=3.0)
    assert best == {} and made.confirmed == [{}]
    assert store.journal.trials[store.journal.best or 0].through == "server"


def test_the_front_has_what_nothing_beats_in_both(tmp_path: Path) -> None:
    made = Made()
    _, store = made.search(tmp_path, ttft_s=9.0)
    trial = store.journal.trials[0]
    places = [(100.0, 0.1), (200.0, 0.1), (50.0, 0.1), (200.0, 0.1)]
    measured = [Measured(trial, point(*place), True, False) for place in places]
    assert [one.point.result.output_tokens_per_s for one in front_of(measured)] == [50.0, 100.0, 200.0]
