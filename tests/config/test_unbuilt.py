from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headrace.config import KvCacheConnectorConfig, LlmArgs, ServerOptions
from headrace.config.base import ConfigModel, default_of
from headrace.config.errors import ConfigError
from headrace.config.resolution import Typed, resolve
from headrace.config.unbuilt import BUILT, BUILT_VALUES, UNBUILT, UNBUILT_SERVER, WITHOUT_EFFECT, classified


def keys_in_tables() -> list[str]:
    return list(classified())


def test_every_key_stands_in_exactly_one_table() -> None:
    """A key that is added has to be classified: built, built in part, missing, or a mere tuning."""
    tables = keys_in_tables()
    assert [key for key, count in Counter(tables).items() if count > 1] == []
    heads = {key.split(".")[0] for key in tables}
    assert heads == set(LlmArgs.model_fields)
    owners = {key.rsplit(".", 1)[0] for key in tables if "." in key}
    for owner in owners:
        cls: type[ConfigModel] = LlmArgs
        for name in owner.split("."):
            cls = type(default_of(cls, name)) if default_of(cls, name) is not None else cls
        cls = KvCacheConnectorConfig if owner == "kv_connector_config" else cls  # unset by default
        if owner == "cache_transceiver_config":
            continue
        listed = {key[len(owner) + 1 :].split(".")[0] for key in tables if key.startswith(owner + ".")}
        assert listed == set(cls.model_fields), owner


def test_tables_name_server_options_that_exist() -> None:
    assert UNBUILT_SERVER.keys() <= ServerOptions.model_fields.keys()


def other_value(path: str) -> Any:
    """Some valid value that is not the default."""
    values: dict[str, Any] = {
        "mx_config": {"server_url": "u"}, "gms_config": {"mode": "ro"}, "attention_dp_config": {}, "cp_config": {},
        "pp_partition": [1], "dwdp_config": {}, "orchestrator_type": "rpc", "layer_wise_benchmarks_config":
        {"calibration_mode": "MARK"}, "guided_decoding_backend": "xgrammar", "speculative_config":
        {"decoding_type": "MTP"}, "sparse_attention_config": {"algorithm": "dsa"}, "kv_cache_compression_config":
        {"algorithm": "quantization_for_cold_page"},
        "cache_transceiver_config": {"max_tokens_in_buffer": 8}, "lora_config": {}, "peft_cache_config": {},
        "sleep_config": {}, "prometheus_metrics_config": {}, "reorder_policy_config": {},
        "encoder_cuda_graph_config": {}, "multimodal_config": {"video_pruning_rate": 0.5},
        "moe_config.load_balancer": "f.yaml",
        "kv_cache_config.kv_events_config": {},
        "ray_placement_config": {}, "ray_worker_nsight_options": {}, "mla_skip_correction_threshold": 4.0,
        "kv_cache_config.cross_kv_cache_fraction": 0.5,
    }  # fmt: skip
    if path in values:
        return values[path]
    cls: type[ConfigModel] = LlmArgs
    *parents, name = path.split(".")
    for parent in parents:
        cls = type(default_of(cls, parent))
    default, annotation = default_of(cls, name), str(cls.model_fields[name].annotation)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    return 2 if "int" in annotation else "x"


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


HELPERS = {
    "encoder_cuda_graph_config": {"encoder_max_batch_size": 2},
    "ray_placement_config": {"orchestrator_type": "ray"},
    "ray_worker_nsight_options": {"orchestrator_type": "ray"},
    "ray_worker_extension_cls": {"orchestrator_type": "ray"},
    "speculative_config": {},
}
"""What has to be set too, so that only the missing feature is wrong."""


@pytest.mark.parametrize("path", UNBUILT)
def test_what_is_missing_is_refused_by_name(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(arguments={**nested(path, other_value(path)), **HELPERS.get(path, {})}, needs_model=False)
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert found[path] == f"not available yet ({UNBUILT[path]})"
    assert found.keys() <= {path, *HELPERS.get(path, {})}


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"dtype": "fp8"}, "dtype"),
        ({"load_format": "gms"}, "load_format"),
        ({"checkpoint_format": "MX"}, "checkpoint_format"),
        ({"moe_expert_parallel_size": 2, "tensor_parallel_size": 2}, "moe_expert_parallel_size"),
        ({"kv_cache_config": {"dtype": "nvfp4"}}, "kv_cache_config.dtype"),
        ({"kv_cache_config": {"kv_cache_event_hash_algo": "v1_block_key"}}, "kv_cache_config.kv_cache_event_hash_algo"),
        ({"cache_transceiver_config": {"backend": "UCX"}}, "cache_transceiver_config.backend"),
        ({"kv_connector_config": {"connector": "kvbm"}}, "kv_connector_config.connector"),
    ],
)  # fmt: skip
def test_values_that_are_missing_are_refused_by_name(arguments: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(arguments=arguments, needs_model=False)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert f"is not available yet ({BUILT_VALUES[path][1]})" in problem.message


def test_harmless_values_of_missing_features_pass() -> None:
    """Files written for other machines often spell out what is off."""
    resolve(
        arguments={
            "pipeline_parallel_size": 1, "context_parallel_size": 1, "moe_expert_parallel_size": 1,
            "moe_tensor_parallel_size": -1, "enable_attention_dp": False, "speculative_config": None,
            "enable_lora": False, "lora_config": None, "orchestrator_type": None, "checkpoint_format": "HF",
            "cache_transceiver_config": {"backend": None}, "sparse_attention_config": None, "dtype": "bfloat16",
            "kv_cache_config": {"host_cache_size": 0, "disk_cache_size": 0, "event_buffer_max_size": 0,
                                "block_reuse_config": {}, "mamba_state_config": {"periodic_snapshot_interval": 0}},
        },
        needs_model=False,
    )  # fmt: skip


def test_tuning_is_accepted_with_one_line() -> None:
    arguments = {"torch_compile_config": {}, "moe_config": {"disable_finalize_fusion": True},
                 "enable_autotuner": False, "kv_cache_config": {"use_kv_cache_manager_v2": True}}  # fmt: skip
    resolved = resolve(arguments=arguments, needs_model=False)
    lines = [str(note) for note in resolved.notes if "no effect" in note.message]
    assert lines == [
        "no effect on this device: torch_compile_config, moe_config.disable_finalize_fusion, enable_autotuner, "
        "kv_cache_config.use_kv_cache_manager_v2"
    ]
    assert resolve(needs_model=False).notes == ()


def test_server_options_that_are_missing() -> None:
    flags = {"grpc_protocol": Typed("--grpc_protocol", "openengine"), "server_role": Typed("--server_role", "CONTEXT")}
    with pytest.raises(ConfigError) as caught:
        resolve(server_flags=flags, needs_model=False)
    assert str(caught.value).splitlines() == [
        "--grpc_protocol: grpc_protocol: not available yet (this dialect of gRPC: use smg)",
        "--server_role: server_role: not available yet (disaggregated serving)",
    ]


def test_built_keys_are_not_refused_whatever_their_value() -> None:
    assert not BUILT & (UNBUILT.keys() | WITHOUT_EFFECT.keys())
    resolve(arguments={"tensor_parallel_size": 2, "max_beam_width": 8, "env_overrides": {"A": "1"}}, needs_model=False)
