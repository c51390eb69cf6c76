"""Plans and results as msgpack, for ranks in other processes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from headrace.seam import EngineFacts, PoolSizes, StepPlan, StepResult

_DTYPES = {0: np.dtype(np.int32), 1: np.dtype(np.float32)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Array(msgspec.Struct, array_like=True):
    code: int
    shape: list[int]
    data: bytes


class Allocate(msgspec.Struct, tag="allocate"):
    sizes: PoolSizes


class Step(msgspec.Struct, tag="step"):
    plan: StepPlan


class Opened(msgspec.Struct, tag="opened"):
    facts: EngineFacts


class Allocated(msgspec.Struct, tag="allocated"):
    pass


class Done(msgspec.Struct, tag="done"):
    result: StepResult


class Broken(msgspec.Struct, tag="broken"):
    """The rank cannot go on."""

    message: str
    traceback: str
    bad_input: bool


def _encode_array(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return Array(_CODES[value.dtype], list(value.shape), value.tobytes())
    raise TypeError(f"{type(value).__name__} cannot travel between processes")


def _decode_array(kind: Any, value: Any) -> Any:
    array = msgspec.convert(value, Array)
    return np.frombuffer(array.data, _DTYPES[array.code]).reshape(array.shape).copy()


ToRank = Allocate | Step
FromRank = Opened | Allocated | Done | Broken

encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_decode_array).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=_decode_array).decode
