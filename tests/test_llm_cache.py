"""What callers can ask of the KV cache, mostly on a real engine: exact counts, pins, events, figures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.front.fake import FakeLoop, fake_info
from headrace.llm import LLM, RequestError, RequestFailed
from headrace.params import ConversationParams, KvCacheRetentionConfig, SamplingParams, TokenRangeRetentionConfig
from headrace.types import PinInfo, Request, Retention
from tests.test_llm import make_llm
from tests.twin.harness import tiny_llama

BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def engine(folder: Path, *, kv: dict[str, Any] | None = None, **changes: Any) -> LLM:
    cache = {"tokens_per_block": BLOCK, "max_tokens": 160, "event_buffer_max_size": 1000, **(kv or {})}
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_batch_size": 4, "engine_threads": 1, **changes}
    args = LlmArgs.model_validate({"model": str(folder), "kv_cache_config": cache, **settings})
    return LLM.from_args(args)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder, enable_iter_perf_stats=True) as found:
        yield found


def cached(llm: LLM, prompt: list[int], *, max_tokens: int = 1, **options: Any) -> int:
    output = llm.generate(prompt, SamplingParams(max_tokens=max_tokens), use_tqdm=False, **options)
    assert not isinstance(output, list)
    assert output.usage.cached_tokens == output.cached_tokens
    return output.cached_tokens


def prompt_of(first: int, length: int) -> list[int]:
    return [1 + (first * 7 + at) % 50 for at in range(length)]


def press(llm: LLM, *, number: int = 12) -> None:
    """Prompts that fill the cache several times over."""
    prompts = [[1 + (at * 13 + place * (3 + at)) % 60 for place in range(60)] for at in range(number)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False, cache_salt="pressure")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[LLM]:
    with make_llm(tmp_path) as found:
        yield found


class TestArguments:
    """Over the fake runtime."""

    def test_what_requests_say_reaches_the_runtime(self, tmp_path: Path) -> None:
        loop = FakeLoop(fake_info())
        seen: list[Request] = []

        def script(request: Request) -> Iterator[int]:
            seen.append(request)
            return itertools.repeat(97)

        loop.script = script
        keep = KvCacheRetentionConfig(decode_retention_priority=1)
        with make_llm(tmp_path, loop=loop) as llm:
            llm.generate(
                ["a", "b"],
                SamplingParams(max_tokens=1),
                kv_cache_retention_config=[keep, None],
                conversation_params=[None, ConversationParams("talk")],
                use_tqdm=False,
            )
            llm.generate_async(
                "c", kv_cache_retention_config=keep, conversation_params=ConversationParams("talk")
            ).result(5)
            llm.generate(["d", "e"], kv_cache_retention_config=keep, use_tqdm=False)
        assert [request.conversation for request in seen] == ["", "talk", "talk", "", ""]
        assert [request.retention is not None for request in seen] == [True, False, True, True, True]
        assert seen[0].retention == Retention(decode_priority=1)

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ({"kv_cache_retention_config": object()}, "kv_cache_retention_config must be"),
            ({"kv_cache_retention_config": {"decode_retention_priority": 101}}, "decode_retention_priority"),
            ({"conversation_params": object()}, "conversation_params must be"),
            ({"conversation_params": ConversationParams("x" * 2000)}, "conversation_id"),
            ({"cache_salt": "x" * 1_000_000}, "cache_salt has 1,000,000 bytes; at most 1,024"),
            ({"cache_salt": 3}, "cache_salt must be a text"),
        ],
    )
    def test_bad_ones_are_refused(self, fake: LLM, arguments: dict[str, Any], problem: str) -> None:
        for call in (fake.generate, fake.generate_async):
            with pytest.raises(RequestError, match=problem):
                call("a", **arguments)

    def test_one_retention_for_each_prompt(self, fake: LLM) -> None:
        with pytest.raises(ValueError, match="kv_cache_retention_config is a list of 1 and there are 2 prompts"):
            fake.generate(["a", "b"], kv_cache_retention_config=[KvCacheRetentionConfig()])

    def test_events(self, tmp_path: Path) -> None:
        loop = FakeLoop(fake_info())
        loop.kv_events = [{"event_id": 0}, {"event_id": 1}]
        with make_llm(tmp_path, loop=loop) as llm:
            assert [event["event_id"] for event in llm.get_kv_cache_events()] == [0, 1]
            assert llm.get_kv_cache_events(timeout=None) == []
            loop.kv_events = [{"event_id": 2}]

            async def read() -> list[int]:
                return [event["event_id"] async for event in llm.get_kv_cache_events_async(5)]

            assert asyncio.run(read()) == [2]

    @pytest.mark.parametrize(
        ("info", "remedy"), [({"kv_event_buffer": 0}, "event_buffer_max_size"), ({"block_reuse": False}, "block_reuse")]
    )
    def test_no_events_are_an_error_with_the_remedy(self, tmp_path: Path, info: dict[str, Any], remedy: str) -> None:
        with make_llm(tmp_path, loop=FakeLoop(fake_info(**info))) as llm, pytest.raises(ValueError, match=remedy):
            llm.get_kv_cache_events()

    def test_pins(self, tmp_path: Path) -> None:
        loop = FakeLoop(fake_info())
        loop.max_pinned_tokens = 100
        with make_llm(tmp_path, loop=loop) as llm:
            assert llm.pin("x" * 39, name="a") == PinInfo(name="a", num_tokens=40, num_blocks=2)  # with BOS
            assert llm.pin([1] * 60, name="b", cache_salt="s").num_tokens == 60
            with pytest.raises(RequestFailed, match="pins may hold 100 tokens"):
                llm.pin([1, 2], name="c")
            assert llm.pin([1, 2], name="a").num_tokens == 2, "a pin of the same name is replaced"
            assert [pin.name for pin in llm.pins()] == ["a", "b"]
            assert llm.unpin("a") and not llm.unpin("a")
            assert [pin.name for pin in llm.pins()] == ["b"]
            for name in ("", "x" * 2000):
                with pytest.raises(RequestError, match="name"):
                    llm.pin("x", name=name)
            with pytest.raises(ValueError, match="chat template"):
                llm.pin([{"role": "system", "content": "be kind"}], name="d")

    def test_no_pins_without_reuse(self, tmp_path: Path) -> None:
        loop = FakeLoop(fake_info(block_reuse=False))
        with make_llm(tmp_path, loop=loop) as llm, pytest.raises(RequestError, match="enable_block_reuse"):
            llm.pin("x", name="a")


def test_cached_tokens_are_exact(llm: LLM) -> None:
    for length in (3, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1):
        prompt = prompt_of(length, length)
        assert cached(llm, prompt, cache_salt="exact") == 0
        assert cached(llm, prompt, cache_salt="exact") == length - 1, "the last token is always computed"
        longer = [*prompt[:-1], 61, 62, 63]
        assert cached(llm, longer, cache_salt="exact") == length - 1
        assert cached(llm, prompt, cache_salt="another") == 0


def test_whole_blocks_only(folder: Path) -> None:
    with engine(folder, kv={"enable_partial_reuse": False}) as llm:
        prompt = prompt_of(1, 11)
        assert [cached(llm, prompt) for _ in range(2)] == [0, 8]


def test_reuse_switched_off(folder: Path) -> None:
    with engine(folder, kv={"enable_block_reuse": False}) as llm:
        prompt = prompt_of(1, 11)
        assert [cached(llm, prompt) for _ in range(2)] == [0, 0]
        with pytest.raises(ValueError, match="enable_block_reuse"):
            llm.pin(prompt, name="a")
        with pytest.raises(ValueError, match="enable_block_reuse"):
            llm.get_kv_cache_events()


def test_a_pin_survives_pressure(llm: LLM) -> None:
    prompt = prompt_of(2, 21)
    assert llm.pin(prompt, name="system", cache_salt="s").num_tokens == 20
    press(llm)
    assert cached(llm, [*prompt, 9], cache_salt="s") >= 20
    assert llm.unpin("system") and llm.pins() == []
    press(llm)
    assert cached(llm, [*prompt, 9], cache_salt="s") == 0


def test_a_pin_of_the_same_name_is_replaced(llm: LLM) -> None:
    first, second = prompt_of(11, 21), [*prompt_of(11, 8), *range(30, 50)]
    llm.pin(first, name="system", cache_salt="s")
    assert llm.pin(second, name="system", cache_salt="s").num_tokens == 28
    assert [pin.num_tokens for pin in llm.pins()] == [28]
    with pytest.raises(RequestFailed, match="may hold"):
        llm.pin(prompt_of(3, 120), name="system")
    press(llm)
    assert cached(llm, [*second, 9], cache_salt="s") == 28, "what could not be replaced stays"
    assert cached(llm, [*first, 9], cache_salt="s") < 12
    with pytest.raises(RequestFailed, match="fills no block of 4 tokens"):
        llm.pin([1, 2, 3], name="short")
    assert llm.unpin("system") and llm.pins() == []


def test_pins_may_not_starve_the_pool(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match=r"may hold \d+"):
        llm.pin(prompt_of(3, 120), name="large")
    assert llm.pins() == []
    assert cached(llm, prompt_of(4, 120)) == 0


def test_retention_decides_what_goes_first(llm: LLM) -> None:
    precious, plain = prompt_of(5, 24), [1 + at % 3 for at in range(24)]
    keep = KvCacheRetentionConfig(token_range_retention_configs=[TokenRangeRetentionConfig(0, None, 100)])
    cached(llm, precious, kv_cache_retention_config=keep, cache_salt="kept")
    cached(llm, plain, cache_salt="kept")
    press(llm)
    assert cached(llm, plain, cache_salt="kept") == 0
    assert cached(llm, precious, cache_salt="kept") == 23


def test_events_tell_the_blocks(llm: LLM) -> None:
    llm.get_kv_cache_events()
    prompt = prompt_of(6, 9)
    keep = KvCacheRetentionConfig(token_range_retention_configs=[TokenRangeRetentionConfig(0, 4, 80)])
    cached(llm, prompt, cache_salt="told", kv_cache_retention_config=keep)
    events = [event for event in llm.get_kv_cache_events() if event["data"]["type"] == "stored"]
    blocks = [block for event in events for block in event["data"]["blocks"] if block["cache_salt"] == "told"]
    assert [token["token_id"] for block in blocks[:2] for token in block["tokens"]] == prompt[:8]
    assert [block["priority"] for block in blocks[:2]] == [80, 35]
    press(llm)
    removed = {name for event in llm.get_kv_cache_events() for name in event["data"].get("block_hashes", [])}
    assert {block["block_hash"] for block in blocks} & removed


def test_conversations_are_kept_apart(folder: Path) -> None:
    with engine(folder, kv={"block_reuse_config": {"policy": "per_conversation"}}) as llm:
        prompt = prompt_of(7, 13)
        mine, yours = ConversationParams("mine"), ConversationParams("yours")
        assert cached(llm, prompt, conversation_params=mine) == 0
        assert cached(llm, prompt, conversation_params=yours) == 0
        assert cached(llm, prompt, conversation_params=mine) == 12
        assert cached(llm, prompt) == 0


def test_statistics(llm: LLM) -> None:
    llm.get_stats()
    prompt = prompt_of(8, 10)
    cached(llm, prompt, cache_salt="counted")
    cached(llm, prompt, cache_salt="counted")
    records = llm.get_stats()
    windows = [record["kvCacheIterationStats"][str(llm.max_seq_len)] for record in records]
    assert sum(window["iterMissedBlocks"] for window in windows) == 3
    assert sum(window["iterFullReusedBlocks"] for window in windows) == 2
    assert sum(window["iterPartialReusedBlocks"] for window in windows) == 1
    assert sum(window["iterCachedTokensByLevel"][0] for window in windows) == 9
    assert records[-1]["kvCacheStats"]["usedNumBlocks"] == 0


def test_the_next_process_finds_what_never_left_the_device(folder: Path, tmp_path: Path) -> None:
    disk = {"host_cache_size": 100_000, "disk_cache_size": 1_000_000, "disk_cache_path": str(tmp_path)}
    prompts = [prompt_of(first, 30) for first in range(3)]
    with engine(folder, kv=disk) as before:
        for prompt in prompts:
            assert cached(before, prompt) < 4 * BLOCK
    with engine(folder, kv=disk) as after:
        assert [cached(after, prompt) for prompt in prompts] == [28, 28, 28]
        assert cached(after, prompts[0], cache_salt="other") == 0
