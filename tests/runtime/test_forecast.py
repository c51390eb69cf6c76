"""Plans for devices that are not here."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.hub.rank_share import Ranks
from headrace.hub.read_shape import read_shape
from headrace.runtime.forecast import Forecast, Spread, forecast, turn_down
from headrace.runtime.forecast_report import as_dict, as_text
from headrace.runtime.gpus import COLLECTIVES_BYTES, CONTEXT_BYTES, MIB, gpu_named
from tests.hub.test_rank_share import DEEPSEEK_V3, LLAMA_70B, QWEN3_NEXT

GIB = 1 << 30


def planned(config: dict[str, Any], gpu: str = "h200", *, ranks: Ranks | None = None, **args: Any) -> Forecast:
    ranks = ranks or Ranks()
    spread = Spread(gpu_named(gpu, num_ranks=ranks.count), ranks)
    return forecast(LlmArgs.model_validate({"model": "m", **args}), read_shape(config), spread)


def test_a_plan_by_hand() -> None:
    plan = planned(LLAMA_70B, ranks=Ranks(4), max_batch_size=64, max_seq_len=8192, cuda_graph_config=None)
    weights = plan.tightest.facts.weight_bytes
    free = 143_771 * MIB - CONTEXT_BYTES - COLLECTIVES_BYTES - weights - 8192 * (2 * 28_672 + 6 * 8192) * 2
    free -= 64 * 128_256 * (2 + 4)  # logits
    slots = 128 * (1024 + 4 * 4097)
    blocks = int((free - slots) * 0.9) // (327_680 // 4 * 32) - 1
    assert plan.num_tokens == blocks * 32 and plan.max_seq_len == 8192
    assert plan.num_requests(8192) == min(blocks // 256, 64) and plan.num_requests(8193) == 0
    assert planned(LLAMA_70B, ranks=Ranks(4), max_batch_size=64).num_tokens < plan.num_tokens  # graphs


def test_what_does_not_fit_says_why() -> None:
    plan = planned(LLAMA_70B, "h100")
    assert plan.num_tokens == plan.num_requests(100) == plan.max_seq_len == 0
    assert (
        "the weights of a rank take 141,107,412,992 bytes" in plan.problem and "h100 has 85,520,809,984" in plan.problem
    )
    text = as_text(plan, [], length=100, concurrency=1)
    assert "does not fit on 1 x h100" in text


def test_pipeline_stages_are_planned_each() -> None:
    plan = planned({**LLAMA_70B, "num_hidden_layers": 81}, ranks=Ranks(1, 2), pp_partition=None)
    assert [stage.layers for stage in plan.stages] == [range(41), range(41, 81)]
    assert plan.tightest is plan.stages[0]
    assert plan.num_tokens == min(stage.settled.num_tokens for stage in plan.stages if stage.settled)


def test_data_parallel_attention_and_replicas_multiply_caches() -> None:
    ranks = Ranks(8, expert=8, attention_data=True)
    data = planned(DEEPSEEK_V3, ranks=ranks, enable_attention_dp=True)
    assert data.num_caches == 8 and data.num_tokens == 8 * data.tightest.settled.num_tokens  # type: ignore[union-attr]
    tensor = planned(DEEPSEEK_V3, ranks=Ranks(8, expert=8))
    assert tensor.num_caches == 1 and data.num_tokens > 4 * tensor.num_tokens
    args, shape = LlmArgs(model="m"), read_shape(LLAMA_70B)
    one = forecast(args, shape, Spread(gpu_named("b200", num_ranks=1), Ranks()))
    three = forecast(args, shape, Spread(gpu_named("b200", num_ranks=1), Ranks(), 3))
    assert three.num_tokens == 3 * one.num_tokens and three.num_requests(1000) == 3 * one.num_requests(1000)


def test_types_of_cache_and_weights() -> None:
    plain = planned(LLAMA_70B, ranks=Ranks(4))
    fp8 = planned(LLAMA_70B, ranks=Ranks(4), kv_cache_config={"dtype": "fp8"})
    assert fp8.num_tokens == pytest.approx(2 * plain.num_tokens, rel=0.001)
    weights = planned(LLAMA_70B, ranks=Ranks(4), dtype="fp8")
    assert weights.tightest.facts.weight_bytes < 0.53 * plain.tightest.facts.weight_bytes
    assert weights.dtype == "bfloat16" and weights.storage.name == "fp8"
    at_load = planned(LLAMA_70B, ranks=Ranks(4), force_dynamic_quantization=True)
    ends = at_load.tightest.facts.weight_bytes - weights.tightest.facts.weight_bytes
    fewer = planned({**LLAMA_70B, "num_hidden_layers": 79}, ranks=Ranks(4))
    layer = plain.tightest.facts.weight_bytes - fewer.tightest.facts.weight_bytes
    assert ends == pytest.approx(layer, rel=0.05), "of 80 layers two have two bytes a weight"
    assert "weights fp8 at load, but for the first and the last layer" in as_text(at_load, [], length=1, concurrency=1)
    states = planned(QWEN3_NEXT, ranks=Ranks(4), max_batch_size=8, kv_cache_config={"mamba_ssm_cache_dtype": "float32"})
    assert states.tightest.groups[0].spec.dtype == "float32"
    with pytest.raises(ValueError, match=r"kv_cache_config.dtype: the size of 'fp8_ds_mla' is not known"):
        planned(LLAMA_70B, kv_cache_config={"dtype": "fp8_ds_mla"})


def test_windows_as_configured() -> None:
    plan = planned(LLAMA_70B, ranks=Ranks(4), kv_cache_config={"max_attention_window": [131_072, 256]})
    assert [group.spec.window for group in plan.tightest.groups] == [None, 256]
    assert (
        len(planned(LLAMA_70B, ranks=Ranks(4), kv_cache_config={"max_attention_window": [131_072]}).tightest.groups)
        == 1
    )


def test_turning_down_ends_when_it_fits() -> None:
    start = planned(LLAMA_70B, ranks=Ranks(2))
    wanted = start.num_requests(8192) * 2
    changes = turn_down(start, length=8192, concurrency=wanted)
    assert changes[-1].num_requests >= wanted > changes[-2].num_requests
    assert [change.setting for change in changes] == [
        "kv_cache_config.free_gpu_memory_fraction", "max_num_tokens", "max_batch_size", "kv_cache_config.dtype",
    ]  # fmt: skip
    assert turn_down(start, length=8192, concurrency=1) == []


def test_turning_down_from_nothing() -> None:
    changes = turn_down(planned(LLAMA_70B, "h100"), length=4096, concurrency=4)
    assert [change.setting for change in changes][-1] in ("force_dynamic_quantization", "tensor_parallel_size")
    assert ("force_dynamic_quantization", "true") in [(change.setting, change.yaml) for change in changes]
    assert changes[-1].num_requests >= 4 and not changes[-1].problem


def test_a_batch_is_raised_to_what_is_wanted() -> None:
    (change,) = turn_down(planned(LLAMA_70B, ranks=Ranks(8), max_batch_size=4), length=1000, concurrency=16)
    assert (change.setting, change.value, change.num_requests) == ("max_batch_size", 16, 16)


def test_caps_are_the_first_to_go() -> None:
    plan = planned(LLAMA_70B, ranks=Ranks(8), kv_cache_config={"max_tokens": 4096})
    (change,) = turn_down(plan, length=4096, concurrency=4)
    assert (change.setting, change.value, change.yaml) == ("kv_cache_config.max_tokens", None, "null")


def test_nothing_helps() -> None:
    plan = planned(LLAMA_70B, ranks=Ranks(8))
    assert turn_down(plan, length=200_000, concurrency=1) == []  # longer than the model's positions
    text = as_text(plan, [], length=200_000, concurrency=1)
    assert "0 requests of 200,000 tokens at a time, which is more than the longest one has" in text


def test_the_report() -> None:
    plan = planned(QWEN3_NEXT, "h100", ranks=Ranks(4))
    changes = turn_down(plan, length=9000, concurrency=1000)
    text = as_text(plan, changes, length=9000, concurrency=1000)
    assert "its prefixes are reused at snapshots only, and mamba_state_config takes none" in text
    assert "= 2 x 12 layers x 1 KV head x 256 x 2 bytes (the same on 2 ranks)" in text
    assert "recurrent states" in text and "turn first, one after another:" in text
    report = as_dict(plan, changes, length=9000, concurrency=1000)
    (stage,) = report["stages"]
    assert [group["kind"] for group in stage["groups"]] == ["GDN", "GQA"]
    assert stage["groups"][1]["bytes_per_token"] == 12_288 and report["fits"]["tokens"] == plan.num_tokens
    assert sum(stage["weight_bytes_by_form"].values()) == stage["weight_bytes"]
    unknown = as_text(planned({**LLAMA_70B, "model_type": "new"}), [], length=1, concurrency=1)
    assert "this model type has no rules here" in unknown


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [("H200", 143_771 * MIB), ("NVIDIA H100-80GB", 81_559 * MIB), ("A100-40GB", 40_960 * MIB), ("l40s", 46_068 * MIB),
     ("RTX 4090", 24_564 * MIB), ("80GiB", 80 * GIB), ("141 GB", 141 * 10**9), ("512m", 512 * MIB)],
)  # fmt: skip
def test_gpus_by_name_and_by_size(text: str, memory_bytes: int) -> None:
    device = gpu_named(text, num_ranks=1)
    assert (device.memory_bytes, device.reserved_bytes) == (memory_bytes, CONTEXT_BYTES)
    assert gpu_named(text, num_ranks=2).reserved_bytes == CONTEXT_BYTES + COLLECTIVES_BYTES


def test_an_unknown_gpu() -> None:
    with pytest.raises(ValueError, match=r"--gpu: 'h300' is not known: did you mean \w+\?"):
        gpu_named("h300", num_ranks=1)
    with pytest.raises(ValueError, match=r"--gpu: 'abacus' is not known: known are t4, .*such as 80GiB"):
        gpu_named("abacus", num_ranks=1)
