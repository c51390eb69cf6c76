"""A real Prometheus scrapes a real server of two processes: what it stores is what was asked of the server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.server.run import bind
from tests.cli.test_bad_input import checkpoint as checkpoint
from tests.server.test_fronts import Several
from tests.server.test_service import until

from .test_files import DEPLOY, RULES, expressions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian's package) isn't here"),
]

NUM_REQUESTS = 12


class Prometheus:
    def __init__(self, folder: Path, target: str) -> None:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{port}/api/v1"
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self.log = folder / "log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output
            )

    def get(self, path: str, **query: str) -> Any:
        answer = httpx.get(f"{self.url}/{path}", params=query, timeout=10).json()
        assert answer["status"] == "success", (answer, query)
        return answer["data"]

    def value(self, expression: str) -> float | None:
        """None: there is no such series yet."""
        try:
            result = self.get("query", query=expression)["result"]
        except httpx.TransportError:
            return None
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Several]:
    found = Several(checkpoint, tmp_path, "--num_serve_frontends", "2", "--set", "return_perf_metrics=true")
    try:
        assert until(found.is_ready, 150), found.log.read_text()
        yield found
    finally:
        found.end()


def test_it_stores_what_happened(server: Several, tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    prometheus = Prometheus(folder, server.url.removeprefix("http://"))
    try:
        assert until(lambda: prometheus.value('up{job="headrace"}') == 1, 60), prometheus.log.read_text()
        assert all(server.complete(logprobs=1).status_code == 200 for _ in range(NUM_REQUESTS))
        assert server.complete(n=0).status_code == 400
        ended = "sum(trtllm_requests_total)"
        assert until(lambda: prometheus.value(ended) == NUM_REQUESTS, 30), prometheus.value(ended)
        for name in ("requests_accepted_total", "time_to_first_token_seconds_count", "generation_perplexity_count"):
            assert prometheus.value(f"sum(trtllm_{name})") == NUM_REQUESTS, name
        assert prometheus.value('trtllm_request_error_total{http_code="400"}') == 1
        assert prometheus.value("trtllm_engine_ready") == 1
        assert_expressions_are_answered(prometheus)
        assert until(lambda: all_rules_are_well(prometheus), 30), prometheus.get("rules")
        firing = [alert for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"]
        assert not firing, firing
    finally:
        prometheus.end()


def assert_expressions_are_answered(prometheus: Prometheus) -> None:
    empty = [
        each for found in expressions().values() for each in found if not prometheus.get("query", query=each)["result"]
    ]
    # A ratio of what has not happened has no value, and an alert has one only while it is on.
    assert all(" / " in each or each in alerts() for each in empty), empty


def alerts() -> set[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}


def all_rules_are_well(prometheus: Prometheus) -> bool:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    return bool(rules) and all(rule["health"] == "ok" for rule in rules)
