"""Two and three ranks over gloo, each a process: logits and tokens are those of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.layers.parallel import ParallelContext
from tests.kits.model import save_tiny
from tests.kits.rank import run
from tests.kits.tiny_kimi_k3 import save_kimi_k3

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180

CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "qwen2": {"tie_word_embeddings": True, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 45},
    "gemma3_text": {"final_logit_softcapping": 5.0},
    "gpt_oss": {"intermediate_size": 20},
    "glm4_moe": {},
    "deepseek_v2": {},
    "glm_moe_dsa": {},
    "minimax_m3_vl_text": {},
    "deepseek_v4": {},
    "gemma4_text small": {},
    "gemma4_text experts": {},
}
TOLERANCES = {"gemma4_text small": 6e-5, "gemma4_text experts": 6e-5, "kimi_k3": 6e-5}
"""Their layers' inputs are normed to larger scores (the scale is 1), or small sums are normed (of Kimi-K3), which
spreads what the sum over ranks rounds."""
KV_HEADS = {2: {"llama": [2, 1], "qwen2": [2, 1]}}
"""Of a model that isn't here each rank has one."""


HYBRIDS = ("qwen3_next", "kimi_linear", "nemotron_h", "granitemoehybrid", "glm5_next_text", "falcon_h1")
"""Their recurrent heads come in two groups; Granite's in one, which ranks share."""
KIMI_K3 = "kimi_k3"
"""Of no transformers: its checkpoint has another writer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    made = []
    for model_type, changes in [*CASES.items(), *((name, {}) for name in HYBRIDS)]:
        made.append(tmp_path_factory.mktemp(model_type))
        save_tiny(made[-1], model_type, **changes)
    made.append(tmp_path_factory.mktemp(KIMI_K3))
    save_kimi_k3(made[-1])
    return made


def run_ranks(folders: list[Path], size: int, tmp_path: Path) -> list[list[dict[str, Any]]]:
    """Results by rank, by folder."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    outs = [tmp_path / f"rank{rank}.pt" for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kits.rank", str(rank), str(size), str(tmp_path / "meeting"), str(out)]
            + [str(folder) for folder in folders],
            env=environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [torch.load(out, weights_only=True) for out in outs]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_equal_one_rank(folders: list[Path], size: int, tmp_path: Path) -> None:
    names = [*CASES, *HYBRIDS, KIMI_K3] if size == 2 else list(CASES)
    ranks = run_ranks(folders[: len(names)], size, tmp_path)
    for index, model_type in enumerate(names):
        alone = run(folders[index], ParallelContext())
        results = [rank[index] for rank in ranks]
        for result in results:
            worst = float((result["logits"] - alone["logits"]).abs().max())
            assert worst < TOLERANCES.get(model_type, 1e-5), (model_type, worst)
            assert result["tokens"] == alone["tokens"], model_type
            assert torch.equal(result["logits"], results[0]["logits"]), "ranks sample from the same logits"
            assert result["weight_bytes"] < alone["weight_bytes"]
        if size in KV_HEADS:
            expected = [0, 0] if model_type in (*HYBRIDS, KIMI_K3) else KV_HEADS[size].get(model_type, [1, 1])
            assert [result["num_kv_heads"] for result in results] == expected, "those of the first group"
