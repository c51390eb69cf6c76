"""`headrace bench serve` and the server's own /metrics count the same requests and tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.server.harness import running

NUM, WARMUP, PROMPT, OUTPUT = 20, 2, 16, 8


def counts(url: str) -> dict[str, float]:
    """Counters of /metrics by name and labels, those that tell the model left out."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            bare, _, labels = name.partition("{")
            kept = [one for one in labels.rstrip("}").split(",") if one.startswith("finished_reason=")]
            key = bare.removeprefix("trtllm_") + "".join(kept)
            found[key] = found.get(key, 0.0) + float(value)
    return found


def measured(url: str, folder: Path) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(the report's result, what the counters grew by, the report's latencies in seconds by mean)."""
    before, report = counts(url), folder / "report.json"
    command = [sys.executable, "-m", "headrace.cli.main", "bench", "serve", "--url", url, "--concurrency", "4"]
    command += ["--dataset", str(dataset(folder)), "--warmup", str(WARMUP), "--report_json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    after = counts(url)
    (point,) = json.loads(report.read_text())["points"]
    means = {name: values["mean"] for name, values in point["latency"].items() if values}
    return point["result"], {name: value - before.get(name, 0.0) for name, value in after.items()}, means


def dataset(folder: Path) -> Path:
    """Ids that any vocabulary has, no prefix shared."""
    lines = [
        {"input_ids": [(7 * row + at) % 90 + 3 for at in range(PROMPT)], "output_tokens": OUTPUT} for row in range(NUM)
    ]
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(url: str, folder: Path) -> None:
    result, grown, means = measured(url, folder)
    total = NUM + WARMUP
    assert result["num_requests"] == result["num_done"] == NUM
    assert (result["input_tokens"], result["output_tokens"]) == (NUM * PROMPT, NUM * OUTPUT)
    # The server has seen the warm-up, too, which the report leaves out.
    assert grown["requests_accepted_total"] == total
    assert grown['request_success_totalfinished_reason="length"'] == total
    assert grown["prompt_tokens_total"] == total * PROMPT
    assert grown["generation_tokens_total"] == total * OUTPUT
    for name, told in (("time_to_first_token_seconds", "ttft_s"), ("e2e_request_latency_seconds", "e2e_s")):
        assert grown[f"{name}_count"] == total
        assert grown[f"{name}_sum"] / total <= means[told] * 1.5 + 0.5, "the server's part of what a client waits for"


def test_over_a_model_that_echoes(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        check(server.url, tmp_path)


@pytest.mark.slow
def test_over_a_real_one(url: str, tmp_path: Path) -> None:
    check(url, tmp_path)
