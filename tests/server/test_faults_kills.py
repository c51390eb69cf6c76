"""A server of several processes, killed, stopped and told to end in the middle of its streams."""

from __future__ import annotations

import json
import os
import signal
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

from headrace.server.run import bind
from tests.cli.test_bad_input import checkpoint as checkpoint

from .harness import events_of
from .test_service import until

pytestmark = pytest.mark.slow  # each server starts two to four processes


class Cluster:
    """A server of a tiny model, whose temporary files are where they can be counted."""

    def __init__(self, model: Path, folder: Path, *words: str) -> None:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        command = [sys.executable, "-m", "headrace.cli.main", "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--engine_threads", "1", "--set", "kv_cache_config.max_tokens=16384", *words]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(self.temporary)}
            )
        assert until(self.is_ready, 150), self.log.read_text()
        self.children = descendants(self.process.pid)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.status() == 200

    def status(self) -> int:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=10).status_code
        except httpx.TransportError:
            return 0

    def pids(self, module: str) -> list[int]:
        return [pid for pid in self.children if module in words_of(pid)]

    @property
    def last_line(self) -> str:
        return self.log.read_text().strip().splitlines()[-1]

    def is_clean(self) -> bool:
        """No process, socket or file is left."""
        return not any("headrace" in words_of(pid) for pid in self.children) and not list(self.temporary.iterdir())

    def end(self) -> None:
        for pid in self.children:
            if "headrace" in words_of(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [found for child in children for found in (child, *descendants(child))]


@contextmanager
def cluster(model: Path, folder: Path, *words: str) -> Iterator[Cluster]:
    found = Cluster(model, folder, *words)
    try:
        yield found
    finally:
        found.end()


class Stream:
    """A client that reads to the end."""

    def __init__(self, cluster: Cluster, *, max_tokens: int = 8000) -> None:
        self._body = {"prompt": "ab", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._cluster = cluster
        self.text = ""
        self.is_cut = False
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        assert self.begun.wait(60)

    def _read(self) -> None:
        try:
            with httpx.stream("POST", f"{self._cluster.url}/v1/completions", json=self._body, timeout=90) as response:
                for text in response.iter_text():
                    self.text += text
                    self.begun.set()
        except httpx.TransportError:
            self.is_cut = True
        self.begun.set()

    def error(self) -> Any:
        """The one that it ended with."""
        self.thread.join(60)
        assert not self.is_cut
        *_, last, end = events_of(self.text)
        assert end == "[DONE]"
        return last["error"]


@pytest.mark.parametrize("victim", ["the server", "the engine", "a rank"])
def test_killed_with_two_ranks(checkpoint: Path, tmp_path: Path, victim: str) -> None:
    """Whoever dies, the others end, and what they had on disk and in memory goes with them."""
    with cluster(checkpoint, tmp_path, "--tensor_parallel_size", "2") as server:
        stream = Stream(server)
        pids = {"the server": [server.process.pid], "the engine": server.pids("runtime.process")}
        os.kill((pids.get(victim) or server.pids("runtime.rank"))[-1], signal.SIGKILL)
        if victim == "the server":
            assert server.process.wait(40) == -signal.SIGKILL
        else:
            why = (
                "the runtime process was killed by signal 9"
                if victim == "the engine"
                else "rank 1 was killed by signal 9"
            )
            assert why in stream.error()["message"]
            assert server.process.wait(40) == 1 and why in server.last_line
        assert until(server.is_clean, 30), list(server.temporary.iterdir())


def test_a_rank_that_hangs_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with cluster(checkpoint, tmp_path, "--tensor_parallel_size", "2", "--stall_timeout_s", "3") as server:
        stream = Stream(server)
        begin_s = time.monotonic()
        os.kill(server.pids("runtime.rank")[1], signal.SIGSTOP)
        assert "rank 1 has given no sign of life for 3 s" in stream.error()["message"]
        assert server.process.wait(40) == 1 and time.monotonic() - begin_s < 30
        assert server.last_line == "headrace: rank 1 has given no sign of life for 3 s: it is stopped or hangs"
        assert until(server.is_clean, 30)


def test_an_engine_that_stops_is_not_ready_until_it_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    """Also with nothing to do, and when the clients have left; a supervisor's signal to all processes ends it well."""
    with cluster(checkpoint, tmp_path, "--stall_timeout_s", "2") as server:
        (engine,) = server.pids("runtime.process")
        stream = Stream(server)
        os.kill(engine, signal.SIGSTOP)
        assert until(lambda: server.status() == 503, 40)
        assert httpx.get(f"{server.url}/health").status_code == 200
        os.kill(engine, signal.SIGCONT)
        assert until(lambda: server.status() == 200, 40)
        stream.thread.join(90)
        assert not stream.is_cut and events_of(stream.text)[-1] == "[DONE]"
        os.kill(engine, signal.SIGSTOP)
        assert until(lambda: server.status() == 503, 40), "nothing runs, and nothing can"
        os.kill(engine, signal.SIGCONT)
        assert until(lambda: server.status() == 200, 40)
        for pid in (engine, server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert server.process.wait(40) == 0 and until(server.is_clean, 30)


def test_streams_of_another_server_process_finish(checkpoint: Path, tmp_path: Path) -> None:
    """The first process has nothing to do when the signal comes; the second has the whole time for its stream."""
    with cluster(checkpoint, tmp_path, "--num_serve_frontends", "2") as server:
        os.kill(server.process.pid, signal.SIGSTOP)  # the other one takes the connection
        stream = Stream(server, max_tokens=15_000)
        os.kill(server.process.pid, signal.SIGCONT)
        begin_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        stream.thread.join(90)
        events = events_of(stream.text)
        assert not stream.is_cut and events[-1] == "[DONE]"
        ended_well = "error" not in events[-2] and events[-2]["choices"][0]["finish_reason"] == "length"
        assert ended_well or time.monotonic() - begin_s > 25
        assert server.process.wait(40) == 0 and until(server.is_clean, 30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_server_process_dies_or_hangs(checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = ("--num_serve_frontends", "2", "--stall_timeout_s", "5")
    with cluster(checkpoint, tmp_path, *words) as server:
        os.kill(server.pids("front_process")[0], number)
        why = "was killed by signal 9" if number is signal.SIGKILL else "has given no sign of life for 5 s"
        assert server.process.wait(40) == 1 and f"headrace: server process 2 {why}" in server.last_line
        assert until(server.is_clean, 30)


def test_many_signals_end_it_once(checkpoint: Path, tmp_path: Path) -> None:
    with cluster(checkpoint, tmp_path) as server:
        stream = Stream(server)
        for _ in range(20):
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert stream.error()["code"] == "shutting_down"
        assert server.process.wait(40) == 0 and until(server.is_clean, 30)
        assert "Traceback" not in server.log.read_text(), json.dumps(server.log.read_text())
