"""Salt, conversation, retention and pins of a request: what is refused, and what reaches the runtime."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.front.builder import RequestOptions
from headrace.front.cache import MAX_NAME_BYTES, as_retention_config, name_of, require_events, require_reuse
from headrace.front.errors import RequestError
from headrace.front.fake import fake_info
from headrace.params import KvCacheRetentionConfig, TokenRangeRetentionConfig
from headrace.types import Retention, RetentionRange

from .making import build

PROMPT = [7] * 20


def retention(*ranges: tuple[Any, ...], prompt: list[int] = PROMPT, **more: Any) -> Retention | None:
    config = KvCacheRetentionConfig(
        token_range_retention_configs=[TokenRangeRetentionConfig(*values) for values in ranges], **more
    )
    requests = build(prompt, options=RequestOptions(retention=config), n=2, temperature=1.0)
    assert requests[0].retention == requests[1].retention
    return requests[0].retention


class TestRetention:
    def test_nothing_said_is_nothing(self) -> None:
        assert build(PROMPT)[0].retention is None

    def test_ranges_are_sorted_and_in_seconds(self) -> None:
        found = retention((10, None, 5, 1500), (0, 10, 90), decode_retention_priority=1, decode_duration_ms=250)
        assert found == Retention(
            ranges=(RetentionRange(0, 10, 90, None), RetentionRange(10, None, 5, 1.5)),
            decode_priority=1,
            decode_duration_s=0.25,
        )

    def test_a_range_may_end_with_the_prompt(self) -> None:
        assert retention((19, 20, 1)) is not None

    @pytest.mark.parametrize(
        ("ranges", "field"),
        [
            ([(20, None, 1)], r"\[0\].token_start is 20, and the prompt has 20 tokens"),
            ([(0, 21, 1)], r"\[0\].token_end is 21, and the prompt has 20 tokens"),
            ([(0, 5, 1), (3, 9, 1)], r"\[1\] starts at 3, and .*\[0\] goes to 5"),
            ([(3, 9, 1), (0, 5, 1)], r"\[0\] starts at 3, and .*\[1\] goes to 5"),
            ([(0, None, 1), (3, 9, 1)], r"\[1\] starts at 3, and .*\[0\] goes to the prompt's end"),
            ([(2, 4, 1), (2, 4, 2)], r"\[1\] starts at 2"),
        ],
    )
    def test_ranges_that_can_not_be(self, ranges: list[tuple[Any, ...]], field: str) -> None:
        with pytest.raises(
            RequestError, match=r"^kv_cache_retention_config\.token_range_retention_configs" + field
        ) as e:
            retention(*ranges)
        assert e.value.param == "kv_cache_retention_config" and "\n" not in str(e.value)

    def test_no_more_ranges_than_each_block_can_search(self) -> None:
        parts = [(at, at + 1, 1) for at in range(129)]
        with pytest.raises(RequestError, match="has 129 ranges"):
            retention(*parts, prompt=[1] * 200)

    def test_what_is_cut_off_does_not_count(self) -> None:
        options = RequestOptions(retention=KvCacheRetentionConfig(
            token_range_retention_configs=[TokenRangeRetentionConfig(0, 15, 1)]))  # fmt: skip
        with pytest.raises(RequestError, match="the prompt has 10 tokens"):
            build(PROMPT, options=options, truncate_prompt_tokens=10)

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ({"token_range_retention_configs": [{"token_start": 0, "priority": 101}]}, r"\[0\].priority.*got 101"),
            ({"token_range_retention_configs": [{"token_start": 0, "priority": -1}]}, r"\[0\].priority.*got -1"),
            ({"token_range_retention_configs": [{"token_start": -1, "priority": 1}]}, r"\[0\].token_start"),
            ({"token_range_retention_configs": [{"priority": 1}]}, r"\[0\].token_start"),
            ({"token_range_retention_configs": [{"token_start": 4, "token_end": 4, "priority": 1}]}, "token_end"),
            ({"token_range_retention_configs": 3}, "token_range_retention_configs"),
            ({"decode_retention_priority": 200}, "decode_retention_priority"),
            ({"decode_duration_ms": 0}, "decode_duration_ms"),
            ({"decode_duration_ms": float("nan")}, "decode_duration_ms"),
            ({"priority": 3}, "priority: unknown key"),
            ("high", "must be a KvCacheRetentionConfig, got str"),
            ([1], "must be a KvCacheRetentionConfig, got list"),
        ],
    )
    def test_what_is_no_retention(self, given: Any, problem: str) -> None:
        with pytest.raises(RequestError, match=r"^kv_cache_retention_config.*" + problem) as error:
            as_retention_config(given)
        assert error.value.param == "kv_cache_retention_config" and "\n" not in str(error.value)

    def test_objects_and_json_are_the_same(self) -> None:
        config = KvCacheRetentionConfig(decode_retention_priority=3)
        assert as_retention_config(config) is config
        assert as_retention_config({"decode_retention_priority": 3}) == config
        assert as_retention_config(None) is None


class TestNames:
    @pytest.mark.parametrize(
        "given", ["", "x" * (MAX_NAME_BYTES + 1), "x" * 1_000_000, "é" * 600, "\ud800", 3, b"x", ["a"]]
    )
    def test_what_is_no_name(self, given: Any) -> None:
        with pytest.raises(RequestError, match=r"^cache_salt ") as error:
            name_of(given, "cache_salt")
        assert error.value.param == "cache_salt" and error.value.status == 400 and len(str(error.value)) < 200

    def test_what_is_one(self) -> None:
        assert name_of(None, "cache_salt") == ""
        for name in (" ", "x" * MAX_NAME_BYTES, "\0", "😀"):
            assert name_of(name, "cache_salt") == name

    def test_the_builder_checks_too(self) -> None:
        for field, param in (("cache_salt", "cache_salt"), ("conversation", "conversation_id"), ("pin", "name")):
            with pytest.raises(RequestError, match=param):
                build(PROMPT, options=RequestOptions(**{field: "x" * 2000}))

    def test_they_reach_the_runtime(self) -> None:
        request = build(PROMPT, options=RequestOptions(cache_salt="s", conversation="c", pin="p"))[0]
        assert (request.cache_salt, request.conversation, request.pin) == ("s", "c", "p")


def test_events_need_reuse_and_a_buffer() -> None:
    require_events(fake_info())
    with pytest.raises(RequestError, match="event_buffer_max_size"):
        require_events(fake_info(kv_event_buffer=0))
    for check in (require_events, require_reuse):
        with pytest.raises(RequestError, match="enable_block_reuse"):
            check(fake_info(block_reuse=False))
