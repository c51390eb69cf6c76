"""A real Prometheus scrapes a server: what it stores is what was asked of the server."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.server.run import bind
from tests.cli.test_bad_input import checkpoint as checkpoint
from tests.server.harness import running
from tests.server.loop_process import LoopProcess, SlowEngine
from tests.server.test_fronts import Several
from tests.server.test_service import until

from .test_files import DEPLOY, RULES, expressions

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian's package) isn't here")

NUM_REQUESTS = 12


class Prometheus:
    def __init__(self, folder: Path, target: str) -> None:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        rules = yaml.safe_load(RULES.read_text())
        for group in rules["groups"]:
            group["interval"] = "1s"
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        config["rule_files"] = [str(folder / "rules.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{port}/api/v1"
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self.client = httpx.Client(timeout=10)
        self.log = folder / "log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output
            )

    def get(self, path: str, **query: str) -> Any:
        answer = self.client.get(f"{self.url}/{path}", params=query).json()
        assert answer["status"] == "success", (answer, query)
        return answer["data"]

    def value(self, expression: str) -> float | None:
        """None: there is no such series yet."""
        try:
            result = self.get("query", query=expression)["result"]
        except (httpx.TransportError, json.JSONDecodeError):  # it doesn't listen yet, or says 503 in words
            return None
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def expect(self, complete: Callable[..., httpx.Response]) -> None:
        """What is asked of the server is what is stored."""
        assert until(lambda: self.value('up{job="headrace"}') == 1, 60), self.log.read_text()
        assert all(complete(logprobs=1).status_code == 200 for _ in range(NUM_REQUESTS))
        assert complete(n=0).status_code == 400
        refused = 'trtllm_request_error_total{http_code="400"}'  # the last thing asked: a scrape that has it has all
        assert until(lambda: self.value(refused) == 1, 30), self.value(refused)
        assert self.value("sum(trtllm_requests_total)") == NUM_REQUESTS
        for name in ("requests_accepted_total", "time_to_first_token_seconds_count", "generation_perplexity_count"):
            assert self.value(f"sum(trtllm_{name})") == NUM_REQUESTS, name
        assert self.value("trtllm_engine_ready") == 1
        assert_expressions_are_answered(self)
        assert until(lambda: all_rules_are_well(self), 30), self.get("rules")
        firing = [alert for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]
        assert not firing, firing

    def end(self) -> None:
        self.client.close()
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


@contextlib.contextmanager
def prometheus(folder: Path, url: str) -> Iterator[Prometheus]:
    (folder / "prometheus").mkdir()
    found = Prometheus(folder / "prometheus", url.removeprefix("http://"))
    try:
        yield found
    finally:
        found.end()


@pytest.mark.slow
def test_it_stores_what_happened(server: Several, tmp_path: Path) -> None:
    """A real engine, and two server processes."""
    with prometheus(tmp_path, server.url) as found:
        found.expect(server.complete)


def test_it_stores_what_happened_on_a_fake_engine(tmp_path: Path) -> None:
    """The real server, loop and cache."""
    runtime = LoopProcess(engine=SlowEngine(tokens_per_block=8), max_batch_size=4, kv_cache_config={"max_tokens": 640})
    with running(tmp_path, runtime=runtime) as server, prometheus(tmp_path, server.url) as found:
        url = f"{server.url}/v1/completions"
        found.expect(lambda **body: httpx.post(url, json={"prompt": "ab", "max_tokens": 3, **body}, timeout=20))


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
