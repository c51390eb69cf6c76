"""A server as a child process, for benchmarks: started, waited for, ended."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
POLL_S = 0.05
STOP_TIMEOUT_S = 15.0


def environment(**variables: str) -> dict[str, str]:
    """Of child processes: this checkout goes before an installed package."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(command: Sequence[str], port: int, *, timeout_s: float = 120.0) -> Iterator[subprocess.Popen[bytes]]:
    """Ready inside the block, gone after it. Its output is shown if it does not come up."""
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment())
    try:
        deadline_s = time.monotonic() + timeout_s
        while not is_ready(port):
            if server.poll() is not None or time.monotonic() > deadline_s:
                server.kill()
                server.wait()
                errors.seek(0)
                raise RuntimeError(f"the server did not come up:\n{errors.read()}")
            time.sleep(POLL_S)
        yield server
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
