"""Messages between front ends (LLM, HTTP processes) and the runtime: msgpack, never pickle.

A front end owns a range of request ids (`FRONT_SHIFT`), so the runtime routes an output by its
id alone. The common output, one token for a running request, travels as two flat arrays.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.types import Delta, FinishReason, PinInfo, Request

FRONT_SHIFT = 40
"""Request id = front end number << FRONT_SHIFT | counter."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """The sequences of one user request, accepted or refused together."""

    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    ids: list[int]
    reason: FinishReason = "abort"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A front end joins; answered by Ready or Failed when the engine is up (or at once if it is)."""

    front: int


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """The iteration statistics; answered by Stats."""

    drain: bool = True
    """All since the last time, each once; otherwise only the state now."""


class GetMetrics(msgspec.Struct, frozen=True, tag="get_metrics"):
    """Read the runtime's counters and gauges, as often as wanted; answered by Metrics."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """Begin or end a trace of the engine; answered by Profiled, when it has begun or is written."""

    start: bool
    num_steps: int = 0
    """The trace ends by itself after so many steps; 0 is with the next Profile message."""
    start_step: int = 0
    """Steps that are let pass first."""
    activities: list[str] = []
    """Of "CPU" and "GPU"; none is what the device has."""


class GetKvEvents(msgspec.Struct, frozen=True, tag="get_kv_events"):
    """Drain the events of the KV cache; answered by KvEvents."""


class GetPins(msgspec.Struct, frozen=True, tag="get_pins"):
    """List the pinned prompts; answered by Pins with the same `call`."""

    call: int


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Give a pinned prompt up; answered by Pins with the same `call`."""

    call: int
    name: str


class GetCacheMap(msgspec.Struct, frozen=True, kw_only=True, tag="get_cache_map"):
    """What the blocks of the KV cache are in use for, and the top of the prefix tree; answered by CacheMap."""

    max_cells: int = 2048
    """Of all pools together, at least one each."""
    max_prefixes: int = 200
    salt: str = ""
    """Cache salt of whoever asks."""
    with_others: bool = True
    """Prefixes of other salts are told of as well, without their tokens."""
    max_tokens: int = 0
    """Token ids that are told of each prefix of that salt."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish nothing more; close the engine and end."""


class ReuseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which prefixes are reused, after all that could rule it out."""

    granularity: int
    """Tokens: a shared prefix is reused in multiples of it; 0 is no reuse."""
    event_buffer: int = 0
    """Cache events that are kept for a reader; 0 is none."""

    @property
    def is_on(self) -> bool:
        return self.granularity > 0


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """What was logged at start."""

    memory: dict[str, Any] = {}
    """The memory plan of a rank (`MemoryTable.as_dict`)."""
    settings: dict[str, Any] = {}
    """The resolved configuration."""
    quantization: str = ""
    """What the weights are stored as; "" for plain floats."""
    kv_scales: dict[int, tuple[float, float]] = {}
    """By layer, what keys and values of an FP8 cache are divided by; empty for other caches."""
    seconds: float = 0.0
    """How long it took."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end needs to validate requests, settled at start."""

    model: str
    model_type: str
    vocab_size: int
    num_valid_ids: int
    hidden_size: int = 0
    """Of embeddings; 0: this engine gives none."""
    max_seq_len: int
    max_num_tokens: int
    max_batch_size: int
    max_beam_width: int
    enable_chunked_prefill: bool
    kv_num_blocks: int
    tokens_per_block: int
    reuse: ReuseInfo = ReuseInfo(granularity=0)
    startup: Startup = Startup()

    @property
    def max_kv_tokens(self) -> int:
        return self.kv_num_blocks * self.tokens_per_block


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The runtime cannot start or cannot go on; the process ends after this."""

    message: str
    traceback: str = ""
    bad_input: bool = False
    """The user's input is at fault (exit code 2), not the machine or the program (1)."""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    iterations: list[dict[str, Any]]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One value of a metric, by the name it has in the reference."""

    name: str
    value: float
    labels: dict[str, str] = {}


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: how many values were at most each bound, and above the last."""

    name: str
    bounds: list[float]
    counts: list[int]
    """One more than `bounds`; not cumulative."""
    total: float
    """The sum of the values."""


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Of the runtime, whatever front end asks."""

    gauges: list[Sample] = []
    counters: list[Sample] = []
    """Since the start."""
    distributions: list[Distribution] = []


class Profiled(msgspec.Struct, frozen=True, tag="profiled"):
    message: str = ""
    files: list[str] = []
    """Names of the traces that were written."""
    error: str = ""
    """Why nothing was done."""


class KvEvents(msgspec.Struct, frozen=True, tag="kv_events"):
    events: list[dict[str, Any]]


class Pins(msgspec.Struct, frozen=True, tag="pins"):
    call: int
    pins: list[PinInfo]
    found: bool = True
    """Whether there was a pin of that name to give up."""


class PoolMap(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one layer group on one tier. used + cached + free = total, in each cell and in all."""

    section: int
    tier: str
    """device, host or disk."""
    group: int
    kind: str
    """The kind of attention, or recurrent."""
    num_layers: int
    dtype: str
    window: int | None
    block_bytes: int
    num_total: int
    num_used: int
    """Held by requests, copies and pins."""
    num_cached: int
    """Held by nobody, and a prefix may find them."""
    num_pinned: int
    """Of those that are used."""
    blocks_per_cell: int
    """Cells are of consecutive blocks; the last one may have fewer."""
    used: list[int] = []
    """By cell. Pools of too many blocks have no cells."""
    cached: list[int] = []

    @property
    def num_free(self) -> int:
        return self.num_total - self.num_used - self.num_cached


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks of the prefix tree without a branch in it; or a namespace, where all of its runs begin."""

    parent: int
    """Its place in the list, which is before this one; -1 of a namespace."""
    name: str
    """Stands for the tokens up to its end. No guess can be checked by it: it is keyed, anew at each start."""
    section: int = 0
    is_own: bool = False
    """Of the salt of whoever asks."""
    is_private: bool = False
    """One request or conversation alone may find it."""
    is_salted: bool = False
    adapter: int = 0
    start: int = 0
    """Tokens before it."""
    num_tokens: int = 0
    num_blocks: int = 0
    """Of one layer group."""
    on_tier: list[int] = []
    """By tier: how many of these blocks are there, in some layer group."""
    num_holders: int = 0
    """Of the block that most hold."""
    num_below: int = 0
    """Children, those left out included."""
    tokens: list[int] = []
    """Its first ones, where they are told."""


class CacheMap(msgspec.Struct, frozen=True, kw_only=True, tag="cache_map"):
    pools: list[PoolMap]
    prefixes: list[Prefix] = []
    """Each behind its parent."""
    num_hidden: int = 0
    """Namespaces that were left out."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one commit brought to this front end."""

    step: int
    ids: bytes = b""
    """int64 request ids that got exactly one token and nothing else."""
    tokens: bytes = b""
    """int32, one for each of `ids`."""
    deltas: list[Delta] = []

    @property
    def plain(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        return np.frombuffer(self.ids, np.int64), np.frombuffer(self.tokens, np.int32)


Question = GetStats | GetMetrics | Profile | GetKvEvents | GetPins | Unpin | GetCacheMap
"""What is answered, by the link's `reply`, before anything else of its sender is looked at."""
Answer = Stats | Metrics | Profiled | KvEvents | Pins | CacheMap
Up = Submit | Abort | Hello | Shutdown | Question
Down = Ready | Failed | Outputs | Answer

_encoder = msgspec.msgpack.Encoder()
_up = msgspec.msgpack.Decoder(Up)
_down = msgspec.msgpack.Decoder(Down)

encode = _encoder.encode


def decode_up(data: bytes | memoryview) -> Up:
    return _up.decode(data)


def decode_down(data: bytes | memoryview) -> Down:
    return _down.decode(data)


def front_of(request_id: int) -> int:
    return request_id >> FRONT_SHIFT
