"""The names that a server exports, with those of a real scheduler and cache behind it."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace import wire
from headrace.front.fake import FakeLoop, fake_info
from headrace.runtime.totals import StepTotals
from tests.server.harness import running
from tests.sim.setup import setup
from tests.sim.world import World


class Told(FakeLoop):
    """A fake runtime that tells what a real one did."""

    told = wire.Metrics()

    def receive(self, message: wire.Up) -> wire.Down | None:
        return self.told if isinstance(message, wire.GetMetrics) else super().receive(message)


def exported(folder: Path) -> str:
    """The text of /metrics."""
    world = World(setup())
    loop = Told(fake_info())
    loop.told = StepTotals().snapshot(world.scheduler)
    with running(folder, loop=loop) as server:
        return httpx.get(f"{server.url}/metrics").text


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def sample_names(text: str) -> set[str]:
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
