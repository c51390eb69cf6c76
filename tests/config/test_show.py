from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import CudaGraphConfig, EncodeCudaGraphConfig, MTPDecodingConfig, TokenRangeRetentionConfig
from headrace.config.resolution import Resolved, Typed, resolve
from headrace.config.show import as_dict, as_json, as_yaml, changed_keys, plain

CASES: list[dict[str, Any]] = [
    {},
    {"cuda_graph_config": None},
    {"cuda_graph_config": {"seq_lens": [8, 16]}},
    {"cuda_graph_config": {"mode": "encode"}},
    {"cp_config": {}},
    {"speculative_config": {"decoding_type": "MTP", "draft_len_schedule": {1: 4, 8: 2}}},
    {"speculative_config": {"decoding_type": "SA", "max_draft_len": 2}},
    {"sparse_attention_config": {"algorithm": "skip_softmax", "target_sparsity": {"prefill": 0.5}}},
    {"multimodal_config": {"encoder_cuda_graph": {"image": {"buckets": [[16, 2]]}}}},
    {"kv_cache_config": {"mamba_state_cache_interval": 256, "pool_ratio": [0.25, 0.75]}},
    {"env_overrides": {"A": "yes", "B": "1"}, "model_kwargs": {"a": {"b": [1, None, "x: y"]}}},
    {"load_format": "dummy", "attn_backend": "AUTO", "allreduce_strategy": "NCCL"},
    {"moe_config": {"load_balancer": {"num_slots": 4}}},
]


def made(arguments: dict[str, Any]) -> Resolved:
    return resolve(arguments=arguments, needs_model=False, refuse_missing_features=False)


@pytest.mark.parametrize("everything", [False, True], ids=["changed", "all"])
@pytest.mark.parametrize(
    "arguments", CASES, ids=[next(iter(case), "defaults") + str(i) for i, case in enumerate(CASES)]
)
def test_what_is_shown_reads_back_as_the_same(arguments: dict[str, Any], everything: bool, tmp_path: Path) -> None:
    resolved = made(arguments)
    file = tmp_path / "shown.yml"
    file.write_text(as_yaml(resolved, everything=everything))
    again = resolve(config=file, needs_model=False, refuse_missing_features=False)
    assert again.args == resolved.args
    assert yaml.safe_load(file.read_text()) == as_dict(resolved.args, everything=everything)


def test_settings_carry_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yml").write_text(
        "kv_cache_config:\n  tokens_per_block: 64\nmax_batch_size: 8\ncp_config: {cp_size: 2}\n"
    )
    resolved = resolve(
        config="config.yml",
        flags={"model": Typed("MODEL", "m")},
        sets=["max_seq_len=auto"],
        refuse_missing_features=False,
    )
    assert as_yaml(resolved).splitlines() == [
        "model: m  # MODEL",
        "context_parallel_size: 2  # derived",
        "cp_config:",
        "  cp_size: 2  # config.yml:4",
        "max_batch_size: 8  # config.yml:3",
        "max_seq_len: auto  # --set",
        "kv_cache_config:",
        "  tokens_per_block: 64  # config.yml:2",
    ]
    shown = json.loads(as_json(resolved))
    assert shown["config"]["kv_cache_config"] == {"tokens_per_block": 64}
    assert shown["origins"]["kv_cache_config.tokens_per_block"] == "config.yml:2"


def test_all_settings_are_shown_when_asked_for() -> None:
    resolved = made({"max_batch_size": 4})
    everything = as_dict(resolved.args, everything=True)
    assert everything["kv_cache_config"]["tokens_per_block"] == 32
    assert everything["max_num_tokens"] == 8192
    assert "checkpoint_loader" not in everything
    text = as_yaml(resolved, everything=True)
    assert "max_batch_size: 4  # argument\n" in text
    assert "max_num_tokens: 8192\n" in text


def test_defaults_alone_are_still_yaml() -> None:
    assert yaml.safe_load(as_yaml(made({}))) == {}


def test_secrets_are_hidden() -> None:
    resolved = made({"env_overrides": {"HF_TOKEN": "hf_123", "MY_API_KEY": "k_123", "THREADS": "2"}})
    for text in (as_yaml(resolved), as_json(resolved), as_yaml(resolved, everything=True)):
        assert "_123" not in text
        assert "THREADS" in text


def test_python_objects_show_their_class() -> None:
    assert plain(object()) == "<object>"
    assert plain({"a": {3, 1}}) == {"a": [1, 3]}
    assert plain([TokenRangeRetentionConfig(0, 1, 2)])[0]["priority"] == 2


def test_changed_keys_of_unions() -> None:
    assert changed_keys(made({"cuda_graph_config": CudaGraphConfig(max_batch_size=4)}).args) == {
        "cuda_graph_config.max_batch_size": 4
    }
    assert changed_keys(made({"cuda_graph_config": EncodeCudaGraphConfig()}).args).keys() == {"cuda_graph_config"}
    assert changed_keys(made({"speculative_config": MTPDecodingConfig()}).args).keys() == {"speculative_config"}
