"""The parts of `benchmarks/` that could be wrong without anybody noticing."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_worker import pad_left
from benchmarks.stream_client import Stream, completion_body, stream_together, tokens_per_s

ROOT = Path(__file__).parents[2]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(num_tokens: int, *, whole: bool = True) -> bytes:
    """As the server streams: one event a token, one for the end, one for the usage, DONE."""
    events = [f'data: {{"choices":[{{"text":"data: {n}"}}]}}\n\n' for n in range(num_tokens)]
    events.append('data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n')
    events.append(f'data: {{"choices":[],"usage":{{"prompt_tokens":3,"completion_tokens":{num_tokens}}}}}\n\n')
    events += ["data: [DONE]\n\n"] if whole else []
    return b"".join(chunk(event.encode()) for event in events) + (chunk(b"") if whole else b"")


def exchange(bodies: list[dict[str, Any]], head: bytes, content: bytes, *, block: int = 1 << 20) -> list[Stream]:
    """What the client makes of an answer that arrives in blocks of so many bytes."""
    seen: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", request)
        assert length is not None
        seen.append(json.loads(await reader.readexactly(int(length[1]))))
        writer.write(head + b"\r\n\r\n")
        for at in range(0, len(content), block):
            writer.write(content[at : at + block])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run() -> list[Stream]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await stream_together(server.sockets[0].getsockname()[1], bodies)

    streams = asyncio.run(run())
    assert sorted(map(str, seen)) == sorted(map(str, bodies))
    return streams


BODY = completion_body("m", [1, 2, 3], num_output=5, cache_salt="s")
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked"


@pytest.mark.parametrize("block", [1, 3, 7, 100, 1 << 20])
def test_events_are_counted_wherever_blocks_end(block: int) -> None:
    (stream,) = exchange([BODY], OK, answer(5), block=block)
    assert (stream.num_tokens, stream.num_events) == (5, 5)
    assert stream.start_s <= stream.first_s <= stream.end_s


def test_streams_run_together() -> None:
    streams = exchange([BODY, BODY | {"max_tokens": 9}, BODY], OK, answer(4))
    assert [stream.num_tokens for stream in streams] == [4, 4, 4]
    assert tokens_per_s([Stream(1.0, 2.0, 3.0, 10, 10), Stream(2.0, 2.5, 6.0, 5, 5)]) == 3.0


@pytest.mark.parametrize(
    ("head", "content", "message"),
    [
        (b"HTTP/1.1 503 Service Unavailable", b'{"error": "loading"}', "503 Service Unavailable: .*loading"),
        (OK, answer(2, whole=False), "ended early"),
        (OK, b"", "ended early"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(head: bytes, content: bytes, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        exchange([BODY], head, content)


def test_padding_stands_on_the_left_and_is_masked() -> None:
    ids, mask = pad_left([[5, 6, 7], [8]])
    assert ids == [[5, 6, 7], [0, 0, 8]]
    assert mask == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.slow
def test_the_server_under_load() -> None:
    command = [sys.executable, "benchmarks/server_load.py", "--streams", "8", "--output_len", "20", "--repeats", "1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"median of 1: [\d,]+ tokens/s in 8 streams", shown.stdout)


def test_a_busy_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import vs_transformers

    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["vs_transformers.py"])
    monkeypatch.setattr(vs_transformers, "load_prompts", None)
    assert vs_transformers.main() == 1
    assert "load average is 1.50" in capsys.readouterr().err


def test_ratios_are_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import vs_transformers

    assert vs_transformers.ratio([10.0, 20.0, 90.0], [5.0, 5.0, 30.0]) == 3.0
    text = vs_transformers.agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [9, 5, 6]])
    assert text == "1 of 2 answers are the same ids, and on average the first 2 are"
