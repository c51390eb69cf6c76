from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.runtime.settle import CPU_POOL_CAP_BYTES, NoRoom, settle
from headrace.seam import EngineFacts, GroupSpec

GIB = 1 << 30
FULL = GroupSpec((0, 1), 2, 8, "float32", bytes_per_token=1000)
WINDOW = GroupSpec((2,), 2, 8, "float32", 16, 24)
STATES = GroupSpec((3,), 0, 0, "float32", state_bytes=1 << 20)
FACTS = EngineFacts(
    model_type="llama",
    vocab_size=100,
    num_valid_ids=100,
    max_position=4096,
    groups=(FULL, WINDOW),
    weight_bytes=GIB,
    activation_bytes=GIB,
    free_bytes=11 * GIB,
    device="one GPU",
)
HYBRID = dataclasses.replace(FACTS, groups=(FULL, STATES))
PER_BLOCK = 1024 * 32


def settled(facts: EngineFacts = FACTS, **changes: Any) -> Any:
    return settle(LlmArgs.model_validate({"model": "m", **changes}), facts)


def pools_bytes(num_blocks: tuple[int, ...]) -> int:
    return sum(count * group.block_bytes(32) for count, group in zip(num_blocks, FACTS.groups, strict=True))


def rows(result: Any) -> dict[str, int]:
    return {row.name: row.size_bytes for row in result.memory.rows}


def test_the_smallest_of_three_rules() -> None:
    slots = rows(settled())["slots"]
    for fraction in (0.5, 0.9):
        blocks = settled(kv_cache_config={"free_gpu_memory_fraction": fraction}).sizes.num_blocks
        budget = int((10 * GIB - slots) * fraction)
        assert 0 <= budget - pools_bytes(blocks) < PER_BLOCK and blocks[0] > 10 * blocks[1]
    assert settled(kv_cache_config={"max_tokens": 1000}).usable_blocks == 31
    capped = settled(kv_cache_config={"max_gpu_total_bytes": GIB}).sizes.num_blocks
    assert 0 <= GIB - pools_bytes(capped) < PER_BLOCK
    both = {"max_tokens": 100, "max_gpu_total_bytes": GIB}
    assert settled(kv_cache_config=both).usable_blocks == 3


def test_every_group_has_its_blocks_and_the_dummy() -> None:
    assert settled(kv_cache_config={"max_tokens": 64}).sizes.num_blocks == (3, 3)


def test_a_cpu_pool_is_capped_unless_told() -> None:
    facts = dataclasses.replace(FACTS, device="cpu, 2 threads")
    assert 0 <= CPU_POOL_CAP_BYTES - pools_bytes(settled(facts).sizes.num_blocks) < PER_BLOCK
    told = settled(facts, kv_cache_config={"max_gpu_total_bytes": 8 * GIB})
    assert 0 <= 8 * GIB - pools_bytes(told.sizes.num_blocks) < PER_BLOCK


@pytest.mark.parametrize(("wanted", "length"), [(None, 4096), ("auto", 4096), (128, 128)])
def test_max_seq_len(wanted: Any, length: int) -> None:
    assert settled(max_seq_len=wanted).max_seq_len == length


def test_auto_length_is_what_fits() -> None:
    assert settled(max_seq_len="auto", kv_cache_config={"max_tokens": 640}).max_seq_len == 640
    result = settled(max_seq_len="auto", max_num_tokens=64, kv_cache_config={"max_gpu_total_bytes": 2_000_000})
    assert result.max_seq_len == result.num_tokens == 61 * 32
    longer = 62 * 32
    demand, budget = result.demand, 2_000_000
    assert (demand.at_least(FULL, longer) + 1) * 32_000 + (demand.at_least(WINDOW, longer) + 1) * 768 > budget


def test_auto_length_under_a_pool_ratio() -> None:
    cache = {"pool_ratio": [0.5, 0.5], "max_gpu_total_bytes": 2_000_000}
    result = settled(max_seq_len="auto", kv_cache_config=cache)
    assert result.max_seq_len == result.num_tokens == (1_000_000 // 32_000 - 1) * 32


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="max_seq_len: 5000 exceeds the model's 4096"):
        settled(max_seq_len=5000)


def test_windows_hold_a_lone_request_of_any_length_and_leave_the_rest() -> None:
    facts = dataclasses.replace(FACTS, max_position=1 << 20)
    result = settled(facts, max_num_tokens=64, kv_cache_config={"avg_seq_len": 100_000})
    full, window = result.sizes.num_blocks
    assert window >= -(-(15 + 2 * 64) // 32) + 1 and full > 100 * window
    assert result.num_tokens == (full - 1) * 32


def test_only_windows_hold_any_length() -> None:
    facts = dataclasses.replace(FACTS, groups=(WINDOW,))
    result = settled(facts, max_num_tokens=64, kv_cache_config={"max_gpu_total_bytes": 10_000})
    assert result.sizes.num_blocks == (10_000 // 768,)
    assert result.num_tokens == 4096 == result.max_seq_len


def test_pool_ratio_is_followed_and_has_to_fit() -> None:
    result = settled(kv_cache_config={"pool_ratio": [0.25, 0.75], "max_gpu_total_bytes": GIB})
    assert result.sizes.num_blocks == (GIB // 4 // 32_000, GIB * 3 // 4 // 768)
    with pytest.raises(ValueError, match=r"kv_cache_config.pool_ratio: 3 shares for a model of 2 layer groups"):
        settled(kv_cache_config={"pool_ratio": [0.2, 0.3, 0.5]})


def test_live_states_come_first_and_snapshots_are_a_pool() -> None:
    cache = {"mamba_state_config": {"periodic_snapshot_interval": 64}}
    result = settled(HYBRID, max_batch_size=100, kv_cache_config=cache)
    table = rows(result)
    assert table["recurrent states"] == 201 << 20  # slots, spare ones for overlap, and one for rows that ended
    assert result.sizes.num_blocks[1] > 2
    assert settled(HYBRID, max_batch_size=100).sizes.num_blocks[1] == 2  # no snapshots are taken
    off = {**cache, "enable_block_reuse": False}
    assert settled(HYBRID, max_batch_size=100, kv_cache_config=off).sizes.num_blocks[1] == 2


def test_a_default_batch_is_lowered_to_the_states_that_fit() -> None:
    big = dataclasses.replace(STATES, state_bytes=64 << 20)
    facts = dataclasses.replace(FACTS, groups=(FULL, big))
    result = settled(facts)
    assert result.scheduler.max_batch_size == 39 and result.sizes.num_slots == 78 < 5 * GIB // (64 << 20) == 80
    assert result.scheduler.num_slots == result.sizes.num_slots
    with pytest.raises(NoRoom, match=r"max_batch_size: the recurrent states of 200 sequences take"):
        settled(facts, max_batch_size=200)


def test_lower_tiers(tmp_path: Any) -> None:
    cache = {
        "max_tokens": 3200,
        "host_cache_size": 1 << 24,
        "disk_cache_size": 1 << 26,
        "disk_cache_path": str(tmp_path),
    }
    sizes = settled(kv_cache_config=cache).sizes
    assert sizes.num_blocks == (101, 101) and sizes.disk_folder == str(tmp_path)
    assert sizes.host_blocks == ((1 << 24) // PER_BLOCK,) * 2 and sizes.disk_blocks == ((1 << 26) // PER_BLOCK,) * 2
    assert settled(kv_cache_config={"host_cache_size": 0}).sizes.host_blocks == ()
    disk_only = {key: value for key, value in cache.items() if key != "host_cache_size"}
    assert settled(kv_cache_config=disk_only).sizes.host_blocks == (65, 65)
    with pytest.raises(ValueError, match=r"kv_cache_config.host_cache_size: 1,000 bytes hold no block"):
        settled(kv_cache_config={"host_cache_size": 1000})


def test_on_a_cpu_the_host_tier_is_in_the_same_memory() -> None:
    facts = dataclasses.replace(FACTS, device="cpu, 2 threads", free_bytes=3 * GIB)
    with_host = settled(facts, kv_cache_config={"host_cache_size": GIB})
    without = settled(facts)
    assert with_host.num_tokens < 0.6 * without.num_tokens
    assert rows(with_host)["reserve"] > 0
    with pytest.raises(NoRoom, match="host_cache_size takes 3,221,225,472 bytes of the same memory; lower it"):
        settled(facts, kv_cache_config={"host_cache_size": 3 * GIB})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache_config": {"max_gpu_total_bytes": 100}},
            r"65,536 bytes and 100 bytes are left .*max_gpu_total_bytes",
        ),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 0}}, "raise kv_cache_config.free_gpu_memory_fraction"),
    ],
)
def test_no_room_says_what_was_there(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NoRoom, match=message):
        settled(**changes)


def test_activations_that_leave_nothing() -> None:
    facts = dataclasses.replace(FACTS, activation_bytes=12 * GIB)
    with pytest.raises(NoRoom, match=r"a step of max_num_tokens 8192 takes 12,884,901,888 of .* lower max_num_tokens"):
        settled(facts)
    with pytest.raises(NoRoom, match="max_batch_size: the tables of 2048 sequences"):
        settled(dataclasses.replace(FACTS, free_bytes=GIB + 1000))


def test_overlap_and_slots() -> None:
    on, off = settled(max_batch_size=8).scheduler, settled(max_batch_size=8, disable_overlap_scheduler=True).scheduler
    assert (on.depth, on.num_slots) == (1, 16)  # a request that ended holds its slot while a row is in flight
    assert (off.depth, off.num_slots) == (0, 8)


def test_the_table_adds_up() -> None:
    cache = {"max_tokens": 1 << 20, "host_cache_size": GIB}
    result = settled(kv_cache_config=cache)
    table = result.table
    assert "KV: full attention, 2 layers" in table and "1,048,576 tokens, 32,768 blocks of 32, float32" in table
    assert "KV: window of 16, 1 layer" in table and "KV, host tier" in table
    on_device = [row.size_bytes for row in result.memory.rows if row.tier == "device"]
    assert sum(on_device) == FACTS.weight_bytes + FACTS.free_bytes
    plain = result.memory.as_dict()
    assert plain["device"] == "one GPU" and [row["use"] for row in plain["rows"]][:4] == [
        "weights", "activations", "CUDA graphs", "slots",
    ]  # fmt: skip


def test_graphs_take_their_part() -> None:
    args = LlmArgs.model_validate({"model": "m"})
    assert settle(args, dataclasses.replace(FACTS, graph_bytes=GIB)).num_tokens < settle(args, FACTS).num_tokens
