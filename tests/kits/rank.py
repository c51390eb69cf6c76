"""One tensor-parallel rank as a process: `python -m tests.kits.rank RANK SIZE MEETING OUT FOLDER...`.

Runs a prompt in one chunk and then greedy tokens on each model folder, and writes logits, tokens and head counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from headrace.engine.groups import group_layers
from headrace.hub.source import resolve_model
from headrace.layers.parallel import Gloo, ParallelContext
from tests.kits.model import Row, Sequences, greedy, load_model, prompt

PROMPT_LENGTH = 19
NUM_TOKENS = 8


def run(folder: Path, parallel: ParallelContext) -> dict[str, Any]:
    model, report = load_model(resolve_model(str(folder)), parallel=parallel)
    ids = prompt(PROMPT_LENGTH, seed=3, vocab_size=model.vocab_size)
    (logits,) = Sequences(model).step([(Row(), ids)])
    return {
        "logits": logits,
        "tokens": greedy(model, ids, NUM_TOKENS),
        "num_kv_heads": group_layers(model.layers, torch.float32)[0].num_kv_heads,
        "weight_bytes": report.weight_bytes,
    }


def main(rank: int, size: int, meeting: str, out: str, folders: list[str]) -> None:
    torch.set_num_threads(1)
    group = Gloo(rank, size, init_method=f"file://{meeting}", timeout_s=120)
    results = [run(Path(folder), ParallelContext(rank, size, group)) for folder in folders]
    torch.save(results, out)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
