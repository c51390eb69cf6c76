from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.model import WINDOW, check_all, check_prefill, make_case

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_without_a_window(tmp_path: Path, model_type: str) -> None:
    case = make_case(tmp_path, model_type, use_sliding_window=False, layer_types=None)
    assert [layer.spec.window for layer in case.model.layers] == [None] * 3
    check_all(case)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_later_layers_slide(tmp_path: Path, model_type: str) -> None:
    case = make_case(tmp_path, model_type, layer_types=None, max_window_layers=2)
    assert [layer.spec.window for layer in case.model.layers] == [None, None, WINDOW]
    check_prefill(case)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3", {"head_dim": 20, "num_key_value_heads": 1}),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
    ],
)
def test_options(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    check_prefill(make_case(tmp_path, model_type, **changes))


def test_yarn_extends_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
    assert make_case(tmp_path, "qwen2", rope_parameters=rope).model.max_position == 512
