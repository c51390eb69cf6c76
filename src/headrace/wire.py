"""Messages between front ends (LLM, HTTP processes) and the runtime: msgpack, never pickle.

A front end owns a range of request ids (`FrontEnd.id_base`), so the runtime routes an output by its
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
    """Drain the iteration statistics; answered by Stats."""


class GetKvEvents(msgspec.Struct, frozen=True, tag="get_kv_events"):
    """Drain the events of the KV cache; answered by KvEvents."""


class GetPins(msgspec.Struct, frozen=True, tag="get_pins"):
    """List the pinned prompts; answered by Pins with the same `call`."""

    call: int


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Give a pinned prompt up; answered by Pins with the same `call`."""

    call: int
    name: str


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


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end needs to validate requests, settled at start."""

    model: str
    model_type: str
    vocab_size: int
    num_valid_ids: int
    max_seq_len: int
    max_num_tokens: int
    max_batch_size: int
    max_beam_width: int
    enable_chunked_prefill: bool
    kv_num_blocks: int
    tokens_per_block: int
    reuse: ReuseInfo = ReuseInfo(granularity=0)
    memory: dict[str, Any] = {}
    """The memory plan of a rank (`MemoryTable.as_dict`), as logged at start."""
    settings: dict[str, Any] = {}
    """The resolved configuration, as printed."""
    startup_s: float = 0.0

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


class KvEvents(msgspec.Struct, frozen=True, tag="kv_events"):
    events: list[dict[str, Any]]


class Pins(msgspec.Struct, frozen=True, tag="pins"):
    call: int
    pins: list[PinInfo]
    found: bool = True
    """Whether there was a pin of that name to give up."""


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


Question = GetStats | GetKvEvents | GetPins | Unpin
"""What is answered, by the link's `reply`, before anything else of its sender is looked at."""
Answer = Stats | KvEvents | Pins
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
