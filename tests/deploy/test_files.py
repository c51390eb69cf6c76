"""The files of deploy/: they parse, name metrics, routes and flags that exist, and pass their own checkers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.cli.serve import serve
from headrace.config.llm_args import LlmArgs
from headrace.server.auth import OPEN_PATHS
from headrace.server.run import FLUSH_TIMEOUT_S
from tests.server.harness import running

from .exporter import sample_names

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus/rules.yml"
DASHBOARD = DEPLOY / "grafana/headrace.json"
CLOSE_S = 10
"""For the engine's end and the last bytes."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) isn't here")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze isn't here")


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def rules() -> list[Any]:
    return [rule for group in documents(RULES)[0]["groups"] for rule in group["rules"]]


def expressions() -> dict[str, list[str]]:
    """By where they stand."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    (scaled,) = documents(DEPLOY / "kubernetes/autoscaling.yaml")
    return {
        "dashboard": [filled(target["expr"]) for panel in panels for target in panel.get("targets", ())],
        "rules": [rule["expr"] for rule in rules()],
        "autoscaling": [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]],
    }


def filled(expression: str) -> str:
    """With values for Grafana's variables."""
    for name, value in {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


class TestMetrics:
    @pytest.mark.parametrize("where", ["dashboard", "rules", "autoscaling"])
    def test_every_name_is_exported(self, where: str, metrics_text: str) -> None:
        known = sample_names(metrics_text) | {f"{name}_bucket" for name in histograms(metrics_text)}
        recorded = {rule["record"] for rule in rules() if "record" in rule}
        for expression in expressions()[where]:
            used = set(re.findall(r"\b(?:trtllm_\w+|headrace:[\w:]+)", expression))
            assert used or expression.startswith("up"), expression
            assert used <= known | recorded, expression

    def test_ids_of_panels_are_their_own(self) -> None:
        dashboard = json.loads(DASHBOARD.read_text())
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel.get("targets", ()))
        names = {variable["name"] for variable in dashboard["templating"]["list"]}
        assert names == {"datasource", "model", "instance"}

    @needs_promtool
    def test_every_expression_is_valid(self, tmp_path: Path) -> None:
        checked = [
            {"record": f"check:{where}:{at}", "expr": expression}
            for where, found in expressions().items()
            for at, expression in enumerate(found)
        ]
        file = tmp_path / "rules.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "check", "rules": checked}]}))
        promtool("check", "rules", str(file))

    @needs_promtool
    def test_the_rules_do_what_they_say(self) -> None:
        promtool("check", "rules", str(RULES))
        promtool("test", "rules", str(RULES.with_name("rules.test.yml")))
        promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))

    def test_every_alert_is_tried_out(self) -> None:
        alerts = {
            rule["alert"] for group in documents(RULES)[0]["groups"] for rule in group["rules"] if "alert" in rule
        }
        tests = documents(RULES.with_name("rules.test.yml"))[0]["tests"]
        fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
        assert fired == alerts


def histograms(text: str) -> set[str]:
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and line.endswith("histogram")}


@pytest.fixture(scope="module")
def pod() -> Any:
    found = {document["kind"]: document for document in documents(DEPLOY / "kubernetes/headrace.yaml")}
    assert {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"} == found.keys()
    return found["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("model"), api_keys=("k",)) as server:
        yield server.url


class TestKubernetes:
    def test_probes_are_of_open_routes(self, pod: Any, url: str) -> None:
        (container,) = pod["containers"]
        paths = {name: container[name]["httpGet"]["path"] for name in
                 ("startupProbe", "livenessProbe", "readinessProbe")}  # fmt: skip
        assert paths == {"startupProbe": "/health/ready", "livenessProbe": "/health", "readinessProbe": "/health/ready"}
        assert set(paths.values()) <= OPEN_PATHS
        assert all(httpx.get(url + path).status_code == 200 for path in paths.values())

    def test_there_is_time_to_end_well(self, pod: Any) -> None:
        (container,) = pod["containers"]
        given = [word for word in container["args"] if word.startswith("--shutdown_timeout_s=")]
        shutdown_s = float(given[0].partition("=")[2])
        pre_stop_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= pre_stop_s + shutdown_s + FLUSH_TIMEOUT_S + CLOSE_S

    def test_flags_exist(self, pod: Any) -> None:
        (container,) = pod["containers"]
        serve.make_context("serve", list(container["args"]))
        assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names

    @pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
    def test_yaml(self, path: Path) -> None:
        for document in documents(path):
            assert isinstance(document, dict)
            assert path.parent.name != "kubernetes" or {"apiVersion", "kind", "metadata"} <= document.keys()


class TestDocker:
    def test_stages(self) -> None:
        lines = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.strip()]
        stages = [words[3] for words in lines if words[0] == "FROM"]
        assert {"cpu", "cuda"} <= set(stages)
        users = [words[1] for words in lines if words[0] == "USER"]
        assert users == ["10001"]
        copied = [words[1:-1] for words in lines if words[0] == "COPY" and not words[1].startswith("--from")]
        assert all((ROOT / name).exists() for names in copied for name in names)
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        assert all(f"!{name.removeprefix('./')}" in ignored for names in copied for name in names)

    def test_no_host_but_the_server_itself(self) -> None:
        text = (DEPLOY / "Dockerfile").read_text()
        assert set(re.findall(r"https?://[^/']+", text)) == {"http://localhost:8000"}
        extras = set(re.findall(r"\.\[([\w,]+)\]", text))
        project = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = \[", project, re.M) for found in extras for extra in found.split(","))

    def test_compose(self) -> None:
        (compose,) = documents(DEPLOY / "docker-compose.yml")
        services = compose["services"]
        words = [re.sub(r"\$\{HEADRACE_MODEL:-(.*)\}", r"\1", word) for word in services["headrace"]["command"]]
        serve.make_context("serve", words)
        assert float(services["headrace"]["stop_grace_period"].removesuffix("s")) >= shutdown_default_s() + CLOSE_S
        for service in ("prometheus", "grafana"):
            for volume in services[service]["volumes"]:
                source = volume.partition(":")[0]
                assert source in compose["volumes"] or (DEPLOY / source).exists(), source
        (scraped,) = documents(DEPLOY / "prometheus/prometheus.yml")
        assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["headrace:8000"]


def shutdown_default_s() -> float:
    return LlmArgs.model_fields["shutdown_timeout_s"].default


class TestSystemd:
    UNIT = DEPLOY / "systemd/headrace.service"

    def setting(self, name: str) -> str:
        (value,) = re.findall(rf"^{name}=(.*)$", self.UNIT.read_text(), re.M)
        return value

    def test_flags_exist_and_there_is_time_to_end_well(self) -> None:
        words = self.setting("ExecStart").split()
        assert words[:2] == ["/opt/headrace/bin/headrace", "serve"]
        serve.make_context("serve", words[2:])
        assert (
            float(self.setting("TimeoutStopSec").removesuffix("s")) >= shutdown_default_s() + FLUSH_TIMEOUT_S + CLOSE_S
        )

    @needs_systemd
    def test_systemd_takes_it(self, tmp_path: Path) -> None:
        unit = tmp_path / "headrace.service"
        unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", self.UNIT.read_text(), flags=re.M))
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stderr
        words = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=30", str(unit)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout[-300:]
