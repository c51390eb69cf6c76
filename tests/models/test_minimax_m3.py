"""MiniMax-M3 as published: `minimax_m3_vl` around the text model, other names of keys and of tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.build import build_model
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.quant.none import Dense
from tests.kits.model import (
    Row,
    assert_close,
    check_decode,
    check_prefill,
    load_case,
    prompt,
    save_tiny,
    tiny_config,
)

FILE = "model.safetensors"
NAMES = [
    (r"\.mlp\.(gate\.weight|shared_experts|experts)", r".block_sparse_moe.\1"),
    (r"\.mlp\.gate\.e_score", r".block_sparse_moe.e_score"),
    (r"\.indexer\.", ".index_"),
    (r"^model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
]


def taken_apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors that a published checkpoint has for one of transformers'."""
    for pattern, place in NAMES:
        name = re.sub(pattern, place, name)
    if name.endswith("experts.gate_up_proj"):
        parts = {
            f"{name[:-13]}.{i}.{w}": half
            for i, both in enumerate(value)
            for w, half in zip(("w1", "w3"), both.chunk(2))
        }
    elif name.endswith("experts.down_proj"):
        parts = {f"{name[:-10]}.{i}.w2": each for i, each in enumerate(value)}
    elif name.endswith("gate_up_proj.weight"):
        halves = zip(("gate", "up"), value.chunk(2))
        return {name.replace("gate_up", half): each.contiguous() for half, each in halves}
    else:
        return {name: value}
    return {f"{part}.weight": each.contiguous() for part, each in parts.items()}


def publish(folder: Path) -> None:
    tensors: dict[str, Tensor] = {"vision_tower.patch.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2, 2)}
    for name, value in load_file(folder / FILE).items():
        tensors |= taken_apart(name, value)
    save_file(tensors, folder / FILE)
    text = json.loads((folder / "config.json").read_text())
    sparse = {
        "sparse_num_index_heads": text.pop("index_n_heads"), "sparse_index_dim": text.pop("index_head_dim"),
        "sparse_block_size": text.pop("index_block_size"), "sparse_topk_blocks": text.pop("index_topk_blocks"),
        "sparse_local_block": text.pop("index_local_blocks"),
        "sparse_attention_freq": [int("sparse" in kind) for kind in text["layer_types"]],
        "sparse_disable_index_value": [int("sparse" in kind) for kind in text.pop("layer_types")],
        "use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0,
    }  # fmt: skip
    text |= {
        "hidden_act": "swigluoai", "sparse_attention_config": sparse, "use_gemma_norm": True, "use_qk_norm": True,
        "qk_norm_type": "per_head", "scoring_func": "sigmoid", "use_routing_bias": True,
        "moe_layer_freq": [int(kind == "sparse") for kind in text.pop("mlp_layer_types")],
        "rope_theta": text.pop("rope_parameters")["rope_theta"],
    }  # fmt: skip
    whole = {"model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text, "vision_config": {}}))


def test_a_published_checkpoint(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    oracle = save_tiny(tmp_path, "minimax_m3_vl_text")
    publish(tmp_path)
    case = load_case(resolve_model(str(tmp_path)), oracle)
    check_prefill(case)
    check_decode(case, num_tokens=8)
    assert [layer.spec.kind for layer in case.model.layers if layer.spec is not None] == ["heads", "sparse", "sparse"]


def test_every_query_sees_the_first_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sparse_init_block`, which transformers doesn't read: its choice is made to hold the blocks here."""
    torch.set_num_threads(1)
    oracle = save_tiny(tmp_path, "minimax_m3_vl_text")
    choose = torch.Tensor.topk

    def with_the_first(scores: Tensor, count: int, dim: int = -1) -> Any:
        if scores.dim() == 4:  # of blocks: [batch, index heads, queries, blocks]; those of experts have fewer
            scores[..., 0] = torch.inf
        return choose(scores, count, dim=dim)

    publish(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    case = load_case(resolve_model(str(tmp_path)), oracle)
    ids = prompt(40)
    without = case.logits(ids)
    config["text_config"]["sparse_attention_config"]["sparse_init_block"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    case = load_case(resolve_model(str(tmp_path)), oracle)
    monkeypatch.setattr(torch.Tensor, "topk", with_the_first)
    expected = case.logits(ids)
    monkeypatch.undo()
    assert float((expected - without).abs().max()) > 0.01
    sequences, row = case.sequences(), Row()
    got = torch.cat([sequences.step([(row, ids[begin:end])])[0] for begin, end in ((0, 25), (25, 39), (39, 40))])
    assert_close(got, expected, "with the first block")


SPARSE = {
    "sparse_num_index_heads": 2, "sparse_index_dim": 10, "sparse_block_size": 3, "sparse_topk_blocks": 3,
    "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_init_block": 3}, "1 local and 3 initial blocks are more than the 3 of index_topk_blocks"),
        ({"sparse_score_type": "sum"}, "sparse_score_type 'sum' is not served: only 'max' is"),
        ({"use_sparse_attention": False}, "use_sparse_attention False is not served: only True is"),
        ({"sparse_disable_index_value": [0, 0, 1]}, "sparse_disable_index_value must be 1 in each sparse layer"),
        ({"sparse_topk_freq": 4}, "sparse_topk_freq: not known of MiniMax-M3"),
    ],
)
def test_published_keys_that_are_refused(changes: dict[str, Any], message: str) -> None:
    config = tiny_config("minimax_m3_vl_text").to_dict()
    config.pop("layer_types")
    dense = Dense()
    factory = LayerFactory(dtype=torch.float32, recipe=lambda _: dense, device="meta")
    with pytest.raises(ValueError, match=message):
        build_model({**config, "sparse_attention_config": {**SPARSE, **changes}}, factory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_n_heads": 3}, "index_n_heads 3 must be num_key_value_heads 2"),
        ({"index_head_dim": 2}, "index_head_dim 2 is less than the 4 features"),
        ({"layer_types": ["full_attention"]}, "layer_types must state full_attention or minimax_m3_sparse"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "minimax_m3_vl_text")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=message):
        load_case(resolve_model(str(tmp_path)), None)
