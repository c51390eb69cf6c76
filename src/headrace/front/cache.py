"""What a request says about the KV cache, checked: salt, conversation, retention, the name of a pin."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

from headrace import wire
from headrace.config.errors import ConfigError
from headrace.front.errors import RequestError
from headrace.params import KvCacheRetentionConfig, TokenRangeRetentionConfig
from headrace.types import Retention, RetentionRange

__all__ = ["MAX_NAME_BYTES", "as_retention_config", "name_of", "require_events", "require_reuse", "retention_of"]

MAX_NAME_BYTES = 1024
"""Of a salt, a conversation's id or a pin's name: it is part of keys and is compared for every request."""
MAX_RANGES = 128
"""Each block of the prompt looks for its range."""
RETENTION = "kv_cache_retention_config"


def name_of(given: str | None, param: str) -> str:
    """A text that tells apart, as it is; "" when there is none.

    Raises:
        RequestError: empty, too long, or no text.
    """
    if given is None:
        return ""
    if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's value
        raise RequestError(f"{param} must be a text, got {type(given).__name__}", param=param)
    if not given:
        raise RequestError(f"{param} must not be empty: give a text, or leave it out", param=param)
    try:
        size = len(given.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{param} is no valid text: half of a surrogate pair is in it", param=param) from None
    if size > MAX_NAME_BYTES:
        raise RequestError(
            f"{param} has {size:,} bytes; at most {MAX_NAME_BYTES:,} are taken: send a digest of it", param=param
        )
    return given


def as_retention_config(given: Any) -> KvCacheRetentionConfig | None:
    """A caller's retention, as an object or as its JSON form.

    Raises:
        RequestError: naming the field.
    """
    if given is None or isinstance(given, KvCacheRetentionConfig):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(f"{RETENTION} must be a KvCacheRetentionConfig, got {type(given).__name__}", param=RETENTION)
    try:
        return KvCacheRetentionConfig(**cast("Mapping[str, Any]", given))
    except (ConfigError, TypeError) as error:
        text = "; ".join(str(error).splitlines())
        raise RequestError(f"{RETENTION}.{text}", param=RETENTION) from None


def retention_of(config: KvCacheRetentionConfig | None, *, num_prompt: int) -> Retention | None:
    """Its ranges are in the order of their positions.

    Raises:
        RequestError: a range goes past the prompt, or two overlap, which would leave the priority open.
    """
    if config is None:
        return None
    given = config.token_range_retention_configs
    if len(given) > MAX_RANGES:
        raise _refused("token_range_retention_configs", f"has {len(given)} ranges; at most {MAX_RANGES} are taken")
    named = [(f"token_range_retention_configs[{at}]", part) for at, part in enumerate(given)]
    for name, part in named:
        _check_range(name, part, num_prompt)
    named.sort(key=lambda pair: pair[1].token_start)
    for (name, part), (other, following) in pairwise(named):
        if part.token_end is None or following.token_start < part.token_end:
            end = "the prompt's end" if part.token_end is None else str(part.token_end)
            raise _refused(
                other, f"starts at {following.token_start}, and {name} goes to {end}: ranges may not overlap"
            )
    return Retention(
        ranges=tuple(
            RetentionRange(part.token_start, part.token_end, part.priority, _seconds(part.duration_ms))
            for _, part in named
        ),
        decode_priority=config.decode_retention_priority,
        decode_duration_s=_seconds(config.decode_duration_ms),
    )


def require_reuse(info: wire.ModelInfo) -> None:
    """Raises RequestError when no prefix is ever reused."""
    if not info.reuse.is_on:
        raise RequestError(
            "this engine reuses no blocks: start it with kv_cache_config.enable_block_reuse (see its start log)",
            code="reuse_off",
        )


def require_events(info: wire.ModelInfo) -> None:
    """Raises RequestError when nobody keeps events."""
    require_reuse(info)
    if not info.reuse.event_buffer:
        raise RequestError(
            "this engine keeps no cache events: start it with kv_cache_config.event_buffer_max_size above 0, as 10000",
            code="events_off",
        )


def _check_range(name: str, part: TokenRangeRetentionConfig, num_prompt: int) -> None:
    if part.token_start >= num_prompt:
        raise _refused(f"{name}.token_start", f"is {part.token_start}, and the prompt has {num_prompt} tokens")
    if part.token_end is not None and part.token_end > num_prompt:
        raise _refused(
            f"{name}.token_end",
            f"is {part.token_end}, and the prompt has {num_prompt} tokens: null is the prompt's end",
        )


def _refused(name: str, problem: str) -> RequestError:
    return RequestError(f"{RETENTION}.{name} {problem}", param=RETENTION)


def _seconds(duration_ms: float | None) -> float | None:
    return None if duration_ms is None else duration_ms / 1000
