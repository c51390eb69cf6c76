"""`headrace bench` over a tiny random checkpoint, from the command line to the report."""

from __future__ import annotations

import gc
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import cli
from tests.twin.harness import VOCAB, tiny_llama, transformers_greedy

SMALL = ["--set", "kv_cache_config.max_tokens=2048", "--max-batch-size", "8", "--engine_threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A command sets up the process that it has to itself."""
    threshold = gc.get_threshold()
    loggers = [logging.getLogger(name) for name in ("headrace", "headrace.scheduler")]
    levels = [logger.level for logger in loggers]
    yield
    gc.set_threshold(*threshold)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
        logger.handlers.clear()
        logger.propagate = True


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)], input=stdin)


def done(*arguments: object, stdin: str | None = None) -> str:
    result = run(*arguments, *SMALL, stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_throughput_from_end_to_end(model: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("report", "output", "request")}
    table = done(
        "throughput", model, "--num-requests", 5, "--input-len", 20, "--output_len", 6, "--seed", 3, "--dtype",
        "float32", "--report-json", files["report"], "--output_json", files["output"], "--request_json",
        files["request"], "--iteration_log", tmp_path / "steps.jsonl", "--streaming",
    )  # fmt: skip
    report, outputs, requests = (json.loads(path.read_text()) for path in files.values())
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]

    assert report["kind"] == "throughput" and report["model"] == {
        "name": str(model),
        "type": "llama",
        "dtype": "float32",
    }
    assert report["workload"]["input_len"] == {"mean": 20.0, "min": 20, "max": 20} and report["schema_version"] == 2
    result = report["points"][0]["result"]
    assert (result["num_done"], result["input_tokens"], result["output_tokens"]) == (5, 100, 30)
    assert result["num_steps"] == len(steps) == 6
    assert sum(step["inflightBatchingStats"]["numCtxTokens"] for step in steps) == 100
    assert result["output_tokens_per_s"] == pytest.approx(30 / result["duration_s"])
    assert report["settings"]["max_batch_size"] == 8 and report["memory"]["kv_cache_tokens"] == 2048
    assert report["machine"]["num_threads"] == 1
    assert [(row["task_id"], row["output_tokens"], row["finish"]) for row in requests] == [
        (number, 6, "length") for number in range(5)
    ]
    assert "5 of 5 done, all at once" in table and "TTFT" in table

    import numpy as np

    prompt = np.random.default_rng(3).integers(0, VOCAB, (5, 20))[0].tolist()
    assert outputs[0]["output_ids"] == transformers_greedy(model, prompt, 6)


def test_latency_runs_one_at_a_time_with_the_model_before_the_command(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    table = done("-m", model, "latency", "--num_requests", 3, "--output_len", 4, "--warmup", 0, "--request_json", path)
    assert "3 of 3 done, 1 at a time" in table
    rows = json.loads(path.read_text())
    for before, after in itertools.pairwise(rows):
        assert after["start_s"] >= before["start_s"] + before["e2e_s"] - 0.001


def test_a_file_of_ids_needs_no_tokenizer(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"task_id": 4, "input_ids": [1, 2, 3], "output_tokens": 2}\n{"input_ids": [1], "output_tokens": 3}\n'
    )
    output = tmp_path / "out.json"
    done("throughput", model, "--dataset", path, "--output_json", output, "--concurrency", 1)
    assert [(row["task_id"], len(row["output_ids"])) for row in json.loads(output.read_text())] == [(4, 2), (1, 3)]
    done("throughput", model, "--dataset", "-", stdin=path.read_text())
    text = run("throughput", model, *SMALL, "--dataset", "-", stdin='{"prompt": "a", "output_tokens": 1}')
    assert isinstance(text.exception, ValueError) and "has no tokenizer" in str(text.exception)


def test_eos_ends_a_request_only_where_it_is_named(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    common = ("throughput", model, "--num_requests", 1, "--input_len", 9, "--output_len", 8, "--output_json", path)
    done(*common)
    (row,) = json.loads(path.read_text())
    stop = row["output_ids"][2]
    done(*common, "--eos_id", stop)
    (ended,) = json.loads(path.read_text())
    first = row["output_ids"].index(stop)
    assert ended == {"task_id": 0, "finish": "stop", "output_ids": row["output_ids"][: first + 1]}


def test_requests_that_fail_are_in_the_report_and_the_exit_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.bench.drive.check_tasks", lambda tasks, info: None)
    lines = [{"input_ids": [1] * length, "output_tokens": 2} for length in (3, 300)]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = tmp_path / "report.json"
    result = run("throughput", model, "--dataset", path, "--warmup", 0, "--report_json", report, *SMALL)
    assert result.exit_code == 1
    assert "1 of 2 done" in result.stdout and "headrace: request 1: " in result.stderr
    assert json.loads(report.read_text())["points"][0]["result"]["num_done"] == 1


def changed_settings(model: Path, tmp_path: Path, *arguments: object) -> dict[str, Any]:
    path = tmp_path / "report.json"
    done("throughput", model, "--num_requests", 1, "--output_len", 2, "--report_json", path, *arguments)
    return json.loads(path.read_text())["settings"]["changed"]


def test_spellings_of_the_reference_are_settings(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yml"
    config.write_text("enable_chunked_prefill: false\n")
    settings = changed_settings(
        model, tmp_path, "--scheduler_policy", "max_utilization", "--tp", 1, "--pp", 1, "--config", config,
        "--backend", "pytorch", "--kv_cache_free_gpu_mem_fraction", 0.8, "--max_seq_len", 200,
    )  # fmt: skip
    assert settings["scheduler_config"] == {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert settings["enable_chunked_prefill"] is False and settings["max_seq_len"] == 200
    assert settings["kv_cache_config"]["free_gpu_memory_fraction"] == 0.8

    conflict = run("throughput", model, *SMALL, "--config", config, "--enable_chunked_context")
    assert isinstance(conflict.exception, ValueError) and "enable_chunked_context" in str(conflict.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "MODEL", "--dataset", "nowhere.json"], "no dataset at 'nowhere.json'"),
        (["throughput", "MODEL", "--report_json", "no/such/folder/r.json"], "there is no folder"),
        (["throughput", "MODEL", "--input_len", "300"], "needs 428 tokens .* max_seq_len is 256"),
        (["throughput"], "model: required"),
        (["throughput", "no/model/here"], "no model 'no/model/here'"),
    ],
)
def test_bad_input_is_one_line(model: Path, arguments: list[str], message: str) -> None:
    result = run(*(str(model) if word == "MODEL" else word for word in arguments), *SMALL)
    assert isinstance(result.exception, ValueError), result.output
    assert "\n" not in str(result.exception)
    with pytest.raises(ValueError, match=message):
        raise result.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--concurrency", "0"], "--concurrency"),
        (["throughput", "--concurrency", "1,x"], "numbers with commas"),
        (["throughput", "--request_rate", "0"], "must be above 0"),
        (["throughput", "--request_rate", "1", "--concurrency", "2"], "two kinds of load: keep one"),
        (["throughput", "--slo", "itl=3"], "must be ttft=MS, tpot=MS or e2e=MS"),
        (["throughput", "--eos_id", "-2"], "--eos_id"),
        (["-m", "a", "latency", "b"], "keep one"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in click.unstyle(result.stderr)


def test_help_loads_no_torch() -> None:
    import subprocess
    import sys

    program = (
        "import sys\nfrom headrace.cli.main import run\nassert run(['bench', 'throughput', '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "--report_json" in shown.stdout


def test_a_sweep_has_a_point_for_each_load_and_its_page_and_figures(model: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("a", "b")}
    common = ("throughput", model, "--num_requests", 4, "--input_len", 8, "--output_len", 4, "--warmup", 1)
    table = done(*common, "--concurrency", "1,4", "--slo", "ttft=60000", "--slo", "e2e=0.0001", "--report_json",
                 files["a"],
                 "--html", tmp_path / "page.html", "--plots", tmp_path / "plots")  # fmt: skip
    report = json.loads(files["a"].read_text())
    assert [point["load"]["concurrency"] for point in report["points"]] == [1, 4]
    assert [point["result"]["cached_tokens"] for point in report["points"]] == [0, 0]
    assert all(point["goodput"]["num_requests"] == 0 for point in report["points"])  # nothing ends in 0.1 us
    assert "1 at a time" in table and "goodput" in table
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64,") == len(list((tmp_path / "plots").glob("*.png"))) >= 5
    assert "http" not in page.replace("http://localhost", "") and 'src="/' not in page

    done(*common, "--request_rate", "50", "--report_json", files["b"])
    assert json.loads(files["b"].read_text())["points"][0]["load"]["pattern"] == "poisson"
    wrong = run("compare", files["a"], files["b"])
    assert isinstance(wrong.exception, ValueError) and "no load in common" in str(wrong.exception)
    same = run("compare", files["a"], files["a"], "--fail_if_worse")
    assert same.exit_code == 0 and "0 better" in same.stdout and "0 worse" in same.stdout


def test_prepared_files_are_datasets(model: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "set.jsonl", tmp_path / "out.json"
    shown = run("-m", model, "prepare-dataset", "-o", path, "multi-turn", "--num_conversations", 2, "--num-turns", 3,
                "--system_len", 8, "--turn_len", 4, "--output_len", 2)  # fmt: skip
    assert shown.exit_code == 0 and "2 lines" in shown.stdout, shown.output
    done("throughput", model, "--dataset", path, "--output_json", output, "--warmup", 1, "--concurrency", 1)
    assert [row["task_id"] for row in json.loads(output.read_text())] == [0, 0, 0, 1, 1, 1]
    assert "give --model MODEL" in run("prepare-dataset", "-o", path, "fixed").stderr
