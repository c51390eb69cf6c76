from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.runtime.settle import CPU_POOL_CAP_BYTES, NoRoom, settle
from headrace.seam import EngineFacts, GroupSpec

GIB = 1 << 30
FACTS = EngineFacts(
    model_type="llama",
    vocab_size=100,
    num_valid_ids=100,
    max_position=4096,
    groups=(GroupSpec((0, 1), 2, 8, "float32", bytes_per_token=1000), GroupSpec((2,), 2, 8, "float32", 16, 24)),
    weight_bytes=GIB,
    activation_bytes=GIB,
    free_bytes=11 * GIB,
    device="one GPU",
)


def settled(facts: EngineFacts = FACTS, **changes: Any) -> Any:
    return settle(LlmArgs.model_validate({"model": "m", **changes}), facts)


def test_the_smallest_of_three_rules() -> None:
    per_block = 1024 * 32
    assert settled().usable_blocks == int(10 * GIB * 0.9) // per_block
    assert settled(kv_cache_config={"free_gpu_memory_fraction": 0.5}).usable_blocks == 5 * GIB // per_block
    assert settled(kv_cache_config={"max_tokens": 1000}).usable_blocks == 31
    assert settled(kv_cache_config={"max_gpu_total_bytes": GIB}).usable_blocks == GIB // per_block
    both = {"max_tokens": 100, "max_gpu_total_bytes": GIB}
    assert settled(kv_cache_config=both).usable_blocks == 3


def test_every_group_has_its_blocks_and_the_dummy() -> None:
    assert settled(kv_cache_config={"max_tokens": 64}).num_blocks == (3, 3)


def test_a_cpu_pool_is_capped_unless_told() -> None:
    facts = dataclasses.replace(FACTS, device="cpu, 2 threads")
    assert settled(facts).usable_blocks == CPU_POOL_CAP_BYTES // (1024 * 32)
    told = settled(facts, kv_cache_config={"max_gpu_total_bytes": 8 * GIB})
    assert told.usable_blocks == 8 * GIB // (1024 * 32)


@pytest.mark.parametrize(("wanted", "length"), [(None, 4096), ("auto", 4096), (128, 128)])
def test_max_seq_len(wanted: Any, length: int) -> None:
    assert settled(max_seq_len=wanted).max_seq_len == length


def test_auto_length_is_what_fits() -> None:
    assert settled(max_seq_len="auto", kv_cache_config={"max_tokens": 640}).max_seq_len == 640


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="max_seq_len: 5000 exceeds the model's 4096"):
        settled(max_seq_len=5000)


def test_no_room_says_what_was_there() -> None:
    with pytest.raises(NoRoom, match=r"a block of 32 tokens takes 32,768 bytes and 100 bytes are left"):
        settled(kv_cache_config={"max_gpu_total_bytes": 100})


def test_overlap_and_slots() -> None:
    on, off = settled(max_batch_size=8).scheduler, settled(max_batch_size=8, disable_overlap_scheduler=True).scheduler
    assert (on.depth, on.num_slots) == (1, 16)  # a request that ended holds its slot while a row is in flight
    assert (off.depth, off.num_slots) == (0, 8)


def test_the_table_adds_up() -> None:
    table = settled(kv_cache_config={"max_tokens": 1 << 20}).table
    assert "KV cache" in table and "1,048,576 tokens in 32,768 blocks of 32" in table
