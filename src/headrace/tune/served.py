"""A server for one measurement: `headrace serve` as an operator starts it, in processes of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.bench.http import Server

HOST = "127.0.0.1"
START_TIMEOUT_S = 1800.0
"""Large weights come from slow disks."""
END_TIMEOUT_S = 30.0
POLL_S = 0.1


@contextmanager
def served(config: Path, log: Path) -> Iterator[Server]:
    """`headrace serve --config` on a free port of this machine, until the end of the block.

    Args:
        log: file for what the server says.

    Raises:
        RuntimeError: it has ended, or isn't ready in half an hour; with the last line of its log.
    """
    port = _free_port()
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--config", str(config)]
    command += ["--host", HOST, "--port", str(port)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        server = Server(url=f"http://{HOST}:{port}")
        _await_ready(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _await_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not asyncio.run(_is_ready(server)):
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended with code {process.returncode}: {_last_line(log)} (see {log})")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the server isn't ready after {START_TIMEOUT_S:.0f} s: {_last_line(log)} (see {log})")
        time.sleep(POLL_S)


async def _is_ready(server: Server) -> bool:
    try:
        async with server.ask("GET", "/health/ready") as reply:
            return reply.status == 200
    except (OSError, EOFError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it has said nothing")
