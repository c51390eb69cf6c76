"""`headrace plan`, and bad cache settings on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import run
from headrace.hub.outlines import outline_names
from tests.hub.test_rank_share import LLAMA_70B, QWEN3_NEXT


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    return str(file)


def report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, "--gpu", "h200", "--tp", "4", "--isl", "1000", "--osl", "24"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama: 70.6 billion parameters, 80 layers, 131,072 positions, bfloat16")
    assert "81,920 a token  = 2 x 80 layers x 2 KV heads x 128 x 2 bytes" in out
    assert "fits on 4 x h200 (tensor 4, pipeline 1)" in out and "requests of 1,024 tokens at a time" in out


def test_json_and_settings(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = report(capsys, model, "--gpu", "h200", "--tp", "4", "--kv-dtype", "fp8", "--seq_len", "2048",
                 "--free_gpu_memory_fraction", "0.8", "--max_num_tokens", "2048")  # fmt: skip
    assert fp8["fits"]["request_tokens"] == 2048 and fp8["stages"][0]["groups"][0]["dtype"] == "fp8"
    assert fp8["ranks"]["tensor"] == 4
    spread = report(capsys, model, "--gpu", "b200", "--gpus", "9", "--tp", "2", "--pp", "2")
    assert spread["ranks"] == {"tensor": 2, "pipeline": 2, "expert": 1, "attention_data": False, "replicas": 2}
    assert len(spread["stages"]) == 2


def test_it_says_what_to_turn_down(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    short = report(capsys, model, "--gpu", "h100", "--tp", "2", "--seq_len", "32768", "--concurrency", "8", code=1)
    assert short["fits"]["requests"] < 8 <= short["turn_down"][-1]["requests"]
    assert run(["plan", model, "--gpu", "h100"]) == 1
    out = capsys.readouterr().out
    assert "does not fit on 1 x h100" in out and "tensor_parallel_size: 2" in out


def test_a_config_file_for_another_machine(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yml"
    file.write_text(
        "tensor_parallel_size: 8\nenable_attention_dp: true\nmoe_expert_parallel_size: 8\n"
        "kv_cache_config:\n  host_cache_size: 1000000000000\n  disk_cache_size: 5000000000000\n"
        "  disk_cache_path: /not/here\n"
    )
    (tmp_path / "hybrid.json").write_text(json.dumps(QWEN3_NEXT))
    found = report(capsys, str(tmp_path / "hybrid.json"), "--config", str(file), "--gpu", "b200")
    assert found["ranks"]["attention_data"] and found["ranks"]["expert"] == 8
    uses = [row["use"] for row in found["stages"][0]["memory"]["rows"]]
    assert "KV, host tier" in uses and "KV, disk tier" in uses and "recurrent states" in uses


@pytest.mark.parametrize("name", outline_names())
def test_models_by_name_say_what_their_numbers_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, name, "--gpu", "2048GiB", "--seq_len", "4096", "--tp", "4", "--ep", "4")
    assert found["note"].startswith(f"{name}: Written from the published")
    assert found["model"]["is_known"] and found["stages"][0]["groups"]
    run(["plan", name, "--gpu", "b200"])
    assert capsys.readouterr().out.startswith(f"{name}: Written from the published")
    run(["plan", "--help"])
    assert name in capsys.readouterr().out


def test_this_machine_is_the_default(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {**LLAMA_70B, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100}
    Path(model).write_text(json.dumps(tiny))
    found = report(capsys, model, "--max_batch_size", "8")
    assert found["device"]["name"] == "cpu of this machine" and found["fits"]["tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h900"], "--gpu: 'h900' is not known"),
        (["--gpus", "1", "--tp", "2"], "--gpus: 1 are fewer than the 2 ranks"),
        (["--seq_len", "1", "--isl", "1"], "--seq_len is --isl and --osl together"),
        (["--tp", "128"], "tensor_parallel_size 128 is too large"),
        (["--max_seq_len", "1000000"], "max_seq_len: 1000000 exceeds the model's 131072"),
        (["--set", "kv_cache_config.pool_ratio=[0.5, 0.5]", "--gpu", "b200"],
         "kv_cache_config.pool_ratio: 2 shares for a model of 1 layer groups"),
        (["--set", "kv_cache_config.tokens_per_block=48"], "tokens_per_block: must be a power of two"),
        (["--cp_size", "2"], "context_parallel_size"),
        (["--seq_len", "0"], "0 is not in the range"),
    ],
)  # fmt: skip
def test_bad_input_is_exit_2(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", model, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_no_model_and_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan"]) == 2
    assert "model: required" in capsys.readouterr().err
    assert run(["plan", "/no/such/model"]) == 2
    assert "no model '/no/such/model'" in capsys.readouterr().err


def test_a_plan_needs_no_torch(model: str) -> None:
    code = (
        "import sys; from headrace.cli.main import run;"
        f"print(run(['plan', {model!r}, '--gpu', 'h200', '--tp', '2']), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "0 False"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tokens_per_block=24", "must be a power of two"),
        ("max_attention_window=[64, 0]", "greater than 0"),
        ("free_gpu_memory_fraction=1.5", "less than or equal to 1"),
        ("host_cache_size=9000000000000000", "more than this machine's"),
        ("max_tokens=8", "less than one block"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_bad_cache_settings_end_before_loading(
    command: str, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["hello"] if command == "generate" else []
    assert run([command, "/no/such/model", *more, "--set", f"kv_cache_config.{setting}"]) == 2
    err = capsys.readouterr().err
    assert f"kv_cache_config.{setting.partition('=')[0]}" in err and message in err and "no model" not in err
