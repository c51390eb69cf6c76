"""A client for streamed completions that costs little: raw HTTP/1.1 over asyncio, events counted and not parsed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EVENT = b"data: {"
DONE = b"data: [DONE]"
TAIL_BYTES = 4096
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(frozen=True)
class Stream:
    """One answer. Times are seconds of time.monotonic()."""

    start_s: float
    first_s: float
    end_s: float
    num_tokens: int
    """As the server's usage says."""
    num_events: int


def completion_body(model: str, prompt: Sequence[int], *, num_output: int, cache_salt: str = "") -> dict[str, Any]:
    """Greedy, to its full length, ids as the prompt."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | ({"cache_salt": cache_salt} if cache_salt else {})


async def stream_completion(port: int, data: bytes) -> Stream:
    """Post a body to /v1/completions on this machine and read the stream to its end.

    Raises:
        RuntimeError: the server answered with an error, or ended early.
    """
    start_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    status = await reader.readuntil(b"\r\n\r\n")
    if not status.startswith(b"HTTP/1.1 200"):
        text = (await reader.read()).decode(errors="replace")
        raise RuntimeError(f"the server answered {status.splitlines()[0].decode()}: {text}")
    first_s, num_events, tail = 0.0, 0, b""
    while block := await reader.read(1 << 16):
        first_s = first_s or time.monotonic()
        rest = tail[-(len(EVENT) - 1) :]  # an event may begin in one block and go on in the next
        num_events += (rest + block).count(EVENT)
        tail = (tail + block)[-TAIL_BYTES:]
    writer.close()
    usage = _USAGE.findall(tail)
    if DONE not in tail or not usage:
        raise RuntimeError(f"the stream ended early: {tail[-300:].decode(errors='replace')}")
    # The usage has an event of its own, and each choice's end too.
    return Stream(start_s, first_s, time.monotonic(), int(usage[-1]), num_events - 2)


async def stream_together(port: int, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    """All of them at once."""
    data = [json.dumps(body).encode() for body in bodies]
    return list(await asyncio.gather(*(stream_completion(port, each) for each in data)))


def duration_s(streams: Sequence[Stream]) -> float:
    return max(stream.end_s for stream in streams) - min(stream.start_s for stream in streams)


def tokens_per_s(streams: Sequence[Stream]) -> float:
    return sum(stream.num_tokens for stream in streams) / duration_s(streams)
