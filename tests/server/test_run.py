"""The server as a process: signals, exit codes and last words."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.server.run import bind, url_of

from .harness import events_of
from .test_service import until

ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.server.harness", json.dumps(options)]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.child.stdout is not None
        self.url = self.child.stdout.readline().strip()

    def wait_ready(self) -> None:
        assert until(lambda: self.status("/health/ready") == 200)

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path).status_code
        except httpx.TransportError:
            return 0

    def start_stream(self) -> tuple[threading.Thread, list[str], threading.Event]:
        """A client that reads to the end; the event is set with the first bytes."""
        lines: list[str] = []
        begun = threading.Event()

        def read() -> None:
            body = {"prompt": "abc", "max_tokens": 150, "stream": True}
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as response:
                for text in response.iter_text():
                    lines.append(text)
                    begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(10)
        return thread, lines, begun

    def end(self) -> tuple[int, str]:
        _, errors = self.child.communicate(timeout=20)
        return self.child.returncode, errors


@contextmanager
def process(**options: Any) -> Iterator[Process]:
    found = Process(**options)
    try:
        yield found
    finally:
        found.child.kill()
        found.child.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_streams_finish(number: signal.Signals) -> None:
    with process(step_s=0.01) as server:
        server.wait_ready()
        thread, lines, _ = server.start_stream()
        server.child.send_signal(number)
        assert until(lambda: server.status("/health/ready") == 503)
        assert server.child.poll() is None
        thread.join(20)
        events = events_of("".join(lines))
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        code, errors = server.end()
        assert code == 0 and f"{number.name}: stopping" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_server_is_up_is_told(number: signal.Signals) -> None:
    """While modules are imported and the configuration is read, nothing runs yet that could be drained."""
    program = (
        "from headrace.cli import serve; serve._end_well_on_signals(); print(flush=True); import time; time.sleep(30)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "\n"
    child.send_signal(number)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == 0 and errors == f"headrace: {number.name} before the server was up\n"


@pytest.mark.parametrize("how", ["a second signal", "the timeout"])
def test_what_takes_too_long_ends_with_an_error(how: str) -> None:
    with process(step_s=0.2, shutdown_timeout_s=60 if how == "a second signal" else 0.3) as server:
        server.wait_ready()
        thread, lines, _ = server.start_stream()
        started = time.monotonic()
        server.child.send_signal(signal.SIGTERM)
        if how == "a second signal":
            assert until(lambda: server.status("/health/ready") == 503)
            server.child.send_signal(signal.SIGTERM)
        thread.join(20)
        events = events_of("".join(lines))
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "shutting_down"
        assert server.end()[0] == 0 and time.monotonic() - started < 15


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_it_at_once(number: signal.Signals) -> None:
    with process(never_ready=True) as server:
        assert until(lambda: server.status("/health") == 200)
        assert server.status("/health/ready") == 503
        started = time.monotonic()
        server.child.send_signal(number)
        assert server.end()[0] == 0 and time.monotonic() - started < 10


def test_a_dead_runtime_ends_the_process_with_its_cause_last() -> None:
    with process(step_s=0.02) as server:
        server.wait_ready()
        thread, lines, _ = server.start_stream()
        server.child.send_signal(signal.SIGUSR1)
        thread.join(20)
        events = events_of("".join(lines))
        assert events[-1] == "[DONE]" and "disk is on fire" in events[-2]["error"]["message"]
        code, errors = server.end()
        assert code == 1
        assert (
            errors.strip()
            .splitlines()[-1]
            .endswith("killed by signal 9 (no memory left?): OSError: the disk is on fire")
        )


class TestBind:
    def test_a_port_in_use(self) -> None:
        first = bind("127.0.0.1", 0)
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"can't listen on 127.0.0.1 port {port}.*choose another --port"):
            bind("127.0.0.1", port)
        first.close()

    def test_an_unknown_host(self) -> None:
        with pytest.raises(OSError, match="choose another --host"):
            bind("no.such.host.invalid", 0)

    def test_url(self) -> None:
        with bind("127.0.0.1", 0) as listener:
            assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        if socket.has_ipv6:
            try:
                listener = bind("::1", 0)
            except OSError:
                pytest.skip("no IPv6 here")
            with listener:
                assert url_of(listener).startswith("http://[::1]:")
