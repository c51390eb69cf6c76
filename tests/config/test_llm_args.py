from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import CapacitySchedulerPolicy, KvCacheConfig, LlmArgs, LoadFormat, MultimodalConfig
from headrace.config.errors import KEYS_ARE_IN, ConfigError


def problems(**values: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        LlmArgs(**values)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_defaults_of_limits_and_of_what_differs_on_purpose() -> None:
    args = LlmArgs()
    assert (args.max_batch_size, args.max_num_tokens, args.max_beam_width) == (2048, 8192, 1)
    assert args.max_input_len is None
    assert args.max_seq_len is None
    assert args.enable_chunked_prefill
    assert not args.disable_overlap_scheduler
    assert args.scheduler_config.capacity_scheduler_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    assert (args.shutdown_timeout_s, args.request_timeout_s, args.model_impl) == (30.0, None, "auto")
    assert (args.attn_backend, args.dtype, args.garbage_collection_gen0_threshold) == ("TRTLLM", "auto", 20000)


def test_null_resets_a_limit_to_its_default() -> None:
    args = LlmArgs(max_batch_size=None, max_num_tokens=None, max_beam_width=None, multimodal_config=None)
    assert (args.max_batch_size, args.max_num_tokens, args.max_beam_width) == (2048, 8192, 1)
    assert args.multimodal_config == MultimodalConfig()


def test_lengths_take_numbers_auto_and_null() -> None:
    for value in (1, 4096, "auto", None):
        assert LlmArgs(max_seq_len=value).max_seq_len == value
        assert LlmArgs(max_input_len=value).max_input_len == value
    assert problems(max_seq_len=0) == {"max_seq_len": "must be greater than 0, got 0"}
    assert problems(max_input_len="long") == {"max_input_len": "expected a whole number or auto, got 'long'"}


def test_all_problems_of_a_file_come_at_once() -> None:
    found = problems(max_batch_size=0, max_num_tokens="many", kv_cache_config={"tokens_per_block": 48, "dtype": "fp9"})
    assert found == {
        "max_batch_size": "must be greater than or equal to 1, got 0",
        "max_num_tokens": "expected a whole number, got 'many'",
        "kv_cache_config.tokens_per_block": "must be a power of two greater than 1, got 48",
        "kv_cache_config.dtype": "must be one of auto, float16, bfloat16, float32, fp8, float8_e4m3fn, fp8_ds_mla, "
        "nvfp4, got 'fp9'",
    }


@pytest.mark.parametrize("value", [True, False])
def test_true_is_not_one(value: bool) -> None:
    shown = str(value).lower()
    assert problems(max_batch_size=value) == {"max_batch_size": f"expected a whole number, got {shown}"}
    assert problems(kv_cache_config={"max_attention_window": [1, value]}).keys() == {
        "kv_cache_config.max_attention_window"
    }
    assert "load_format" in problems(load_format=value)


@pytest.mark.parametrize("value", ["DUMMY", "dummy", 1, LoadFormat.DUMMY])
def test_load_formats_in_every_spelling(value: Any) -> None:
    assert LlmArgs(load_format=value).load_format is LoadFormat.DUMMY


def test_a_load_format_that_does_not_exist() -> None:
    assert problems(load_format="pickle") == {
        "load_format": "expected one of auto, dummy, vision_only, gms, got 'pickle'"
    }
    assert "load_format" in problems(load_format=4)


def test_other_spellings_of_keys() -> None:
    assert LlmArgs(hf_revision="main").revision == "main"
    session = object()
    assert LlmArgs(_mpi_session=session).mpi_session is session
    assert "another spelling of revision" in problems(hf_revision="a", revision="b")["hf_revision"]


def test_paths_and_tokenizers(tmp_path: Path) -> None:
    tokenizer = object()
    args = LlmArgs(model=tmp_path, tokenizer=tokenizer)
    assert args.model == str(tmp_path)
    assert args.tokenizer is tokenizer
    assert LlmArgs(tokenizer=tmp_path).tokenizer == str(tmp_path)
    assert problems(tokenizer=["x"]) == {"tokenizer": "expected a folder, a hub id or a tokenizer object"}


@pytest.mark.parametrize(("given", "kept"), [("BF16", "bfloat16"), ("torch.float16", "float16"), ("fp8", "fp8")])
def test_dtype_has_one_spelling(given: str, kept: str) -> None:
    assert LlmArgs(dtype=given).dtype == kept


def test_values_that_can_not_be() -> None:
    assert "must be one of auto, float16" in problems(dtype="float12")["dtype"]
    assert "must be one of AUTO, TRTLLM" in problems(attn_backend="FLASH4")["attn_backend"]
    assert problems(backend="tensorrt") == {"backend": "expected pytorch, got 'tensorrt'"}
    assert problems(moe_expert_parallel_size=0).keys() == {"moe_expert_parallel_size"}
    assert problems(sampler_type="TRTLLMSampler") == {
        "sampler_type": "'TRTLLMSampler' no longer exists: remove the key"
    }
    assert problems(num_serve_frontends=65).keys() == {"num_serve_frontends"}
    assert problems(batch_wait_max_tokens_ratio=1.5).keys() == {"batch_wait_max_tokens_ratio"}
    assert problems(env_overrides={"A": "***"}).keys() == {"env_overrides"}
    assert problems(telemetry_config={"usage_context": "cli"}).keys() == {"telemetry_config.usage_context"}


def test_small_readings() -> None:
    assert LlmArgs(max_stats_len=0).max_stats_len == 1
    assert LlmArgs(attn_backend="flashinfer").attn_backend == "FLASHINFER"
    assert LlmArgs(env_overrides={"A": 1, "B": True}).env_overrides == {"A": "1", "B": "True"}
    assert LlmArgs(sampler_type="TorchSampler").sampler_type == "TorchSampler"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("free_gpu_memory_fraction", "kv_cache_config.free_gpu_memory_fraction"),
        ("tokens_per_block", "kv_cache_config.tokens_per_block"),
        ("capacity_scheduler_policy", "scheduler_config.capacity_scheduler_policy"),
        ("tp_size", "tensor_parallel_size"),
        ("ep_size", "moe_expert_parallel_size"),
        ("max_model_len", "max_seq_len"),
        ("gpu_memory_utilization", "kv_cache_config.free_gpu_memory_fraction"),
        ("max-batch-size", "max_batch_size"),
        ("Max_Batch_Size", "max_batch_size"),
        ("tokens_per_blok", "kv_cache_config.tokens_per_block"),
    ],
)
def test_suggestions_for_keys_from_elsewhere(wrong: str, right: str) -> None:
    assert problems(**{wrong: 1}) == {wrong: f"unknown key, did you mean '{right}'?"}


def test_keys_without_any_likeness_get_no_suggestion() -> None:
    assert problems(zzzz=1) == {"zzzz": f"unknown key: {KEYS_ARE_IN}"}


def test_removed_keys_say_why() -> None:
    assert problems(build_config={})["build_config"].startswith("no longer an option: there is no build step")
    assert problems(quant_config={})["quant_config"] == "no longer an option: quantisation is read from the checkpoint"


def test_assignment_is_checked_until_frozen_and_refused_after() -> None:
    args = LlmArgs()
    args.max_batch_size = 4
    args.kv_cache_config.dtype = "FP8"
    assert args.kv_cache_config.dtype == "fp8"
    with pytest.raises(ConfigError, match="max_batch_size: must be greater"):
        args.max_batch_size = 0
    assert args.max_batch_size == 4
    args.freeze()
    for owner, name in ((args, "max_batch_size"), (args.kv_cache_config, "dtype"), (args.cuda_graph_config, "mode")):
        with pytest.raises(ConfigError, match="resolved and can't change"):
            setattr(owner, name, None)


def test_a_thawed_copy_is_writable_and_knows_what_was_set() -> None:
    cache = KvCacheConfig(max_tokens=64)
    args = LlmArgs(kv_cache_config=cache).freeze()
    copy = args.thaw_copy()
    copy.kv_cache_config.max_tokens = 128
    assert args.kv_cache_config.max_tokens == 64
    assert copy.model_fields_set == {"kv_cache_config"}
    assert copy.kv_cache_config.model_fields_set == {"max_tokens"}
    assert args.is_frozen and not copy.is_frozen


def test_unknown_attributes_are_refused_too() -> None:
    with pytest.raises(ConfigError, match="max_batch_sise"):
        LlmArgs().max_batch_sise = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_settings_travel_between_processes() -> None:
    args = LlmArgs(max_batch_size=4, kv_cache_config=KvCacheConfig(mamba_state_cache_interval=256))
    packed = args.model_dump(mode="json", exclude_unset=True)
    assert LlmArgs.model_validate(packed) == args


@pytest.mark.parametrize("value", [2**63, str(2**63)])
@pytest.mark.parametrize("name", ["max_seq_len", "max_batch_size"])
def test_no_number_is_larger_than_messages_hold(name: str, value: int | str) -> None:
    values: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"{name}: must be less than or equal to 9223372036854775807"):
        LlmArgs(**values)
