"""What a GPU does with every file of the room, without one: its kernels interpreted on a few, and on all of them the
proof that a generation step which is said to be captured asks the device for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine import forward_graphs
from headrace.engine.rank import Rank
from tests.kits.captured import check_engine
from tests.kits.graphs import use_pools
from tests.kits.interpreter import HAS_INTERPRETER
from tests.kits.model import Case, Row, assert_close, make_case, prompt, tiny_config
from tests.kits.no_values import HostMemory, NoUploads, generate, no_values
from tests.kits.sequences import Place
from tests.kits.tiny import tiny_model
from tests.kits.tiny_kimi_k3 import KIMI_K3
from tests.models.test_contract import FORMS, MODEL_TYPES, skip_unless_known

pytestmark = pytest.mark.skipif(not HAS_INTERPRETER, reason="needs Triton and its interpreter")

INTERPRETED = ["deepseek_v4", "glm5_next_text"]
"""Others' kernels are held to the oracle's by tests of their own."""


@pytest.mark.parametrize(
    "row", [*INTERPRETED, *(pytest.param(row, marks=pytest.mark.slow) for row in ("minimax_m3_vl_text", "gpt_oss"))]
)
def test_logits_over_the_backends_of_a_gpu(row: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    check_few(make_case(tmp_path, row, place=Place("cpu", "triton")))


def check_few(case: Case) -> None:
    """Two sequences: whole prompts, chunks, single tokens, and both kinds in one step. Interpreted kernels are slow."""
    texts = [prompt(26, seed=8), prompt(15, seed=9)]
    sequences, rows = case.sequences(), [Row() for _ in texts]
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    for ends in ((17, 0), (22, 7), (23, 14), (24, 15), (26, 15)):
        taking = [at for at, end in enumerate(ends) if end > rows[at].num_cached]
        chunks = [(rows[at], texts[at][rows[at].num_cached : ends[at]]) for at in taking]
        for at, logits in zip(taking, sequences.step(chunks)):
            got[at].append(logits)
    for ids, parts in zip(texts, got):
        assert_close(torch.cat(parts), case.logits(ids), f"row of {len(ids)} tokens")


PADDED = ["deepseek_v4"]
ROWS = [*(model_type for _, model_type in MODEL_TYPES), *FORMS]


@pytest.mark.parametrize(
    "row", [row if row in PADDED else pytest.param(row, marks=pytest.mark.slow) for row in ROWS if row != "kimi_k3"]
)
def test_padded_steps(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as a GPU would capture them, with rows and tokens that pad, computed anew instead of replayed."""
    skip_unless_known(row)
    monkeypatch.setattr(forward_graphs, "CAPTURED_AT", 1)
    monkeypatch.setattr(Rank, "_capture_sizes", captured_sizes)
    use_pools(monkeypatch)
    check_engine(make_case(tmp_path, row))


def captured_sizes(rank: Rank) -> list[int]:
    return [1, 2, 4, 8] if rank.args.cuda_graph_config is not None and rank.model.is_capturable else []


@pytest.mark.parametrize("row", ROWS)
def test_generation_steps_ask_the_device_for_nothing(row: str) -> None:
    config: dict[str, Any] = {"model_type": row, "text_config": KIMI_K3}
    if row != "kimi_k3":
        skip_unless_known(row)
        config = tiny_config(row).to_dict() | {"model_type": tiny_model(row).of or row}
    with no_values():
        logits = generate(config)
    assert logits.device.type == "meta" and logits.shape == (3, config.get("text_config", config)["vocab_size"])


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x + torch.ones(3),
        lambda x: torch.tensor([1, 2, 3]).to(x.device),
    ],
)
def test_what_asks_is_found(ask: object) -> None:
    """The proof above can fail."""
    assert callable(ask)
    with no_values(), pytest.raises((RuntimeError, NotImplementedError, HostMemory)), NoUploads():
        ask(torch.empty(3, device="meta"))
