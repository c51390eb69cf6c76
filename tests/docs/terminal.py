"""Runs a page's commands as its reader would: in order, in one folder, servers in a second terminal."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from .blocks import Block, commands_of

ROOT = Path(__file__).parents[2]
LINKED = ("benchmarks", "deploy", "docs", "examples", "schemas", "src", "tests", "tools", "pyproject.toml")
"""What of the repository a page's folder has links to: commands are told from its root, and leave files there."""
START_TIMEOUT_S = 120


@dataclass
class _Running:
    key: tuple[str, ...]
    ports: list[int]
    process: subprocess.Popen[bytes]
    log: Path


class Servers:
    """The servers that pages have started. One that another page starts by the same words goes on; one whose port
    another wants ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[_Running] = []
        self._elsewhere: dict[int, int] = {}
        self._shims = folder / "bin"
        self._shims.mkdir()
        curl = shutil.which("curl")
        # Without an option, curl ends well whatever the server answers.
        self._shim("curl", f'exec {curl} --fail-with-body "$@"')
        self._shim("headrace", f'exec {sys.executable} -m headrace.cli.main "$@"')
        self.env = {**os.environ, "PATH": f"{self._shims}:{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def here(self, text: str) -> str:
        """The text with the ports that this machine has free where the page's are taken."""
        for port, other in self._elsewhere.items():
            text = re.sub(rf"(?<![\w.]){port}(?!\w)", str(other), text)
        return text

    def start(self, command: str, cwd: Path) -> list[int]:
        """The page's ports of a server that answers. It is started unless one of the same words is there."""
        words = shlex.split(command, comments=True)
        words += [] if "--port" in words else ["--port", "8000"]
        ports = ports_of(words)
        has_files = any((cwd / word).exists() for word in words[2:])
        key = (*sorted(words), *([str(cwd)] if has_files else []))
        if any(running.key == key for running in self._running):
            return ports
        for running in self._running:
            if set(running.ports) & set(ports):
                self._stop(running)
        for port in ports:
            self._elsewhere.pop(port, None)
            if not _is_free(port):
                self._elsewhere[port] = _free_port()
        log = self._folder / f"server-{len(list(self._folder.iterdir()))}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(command)}"], cwd=cwd, env=self.env, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._running.append(_Running(key, ports, process, log))
        self._wait(self._running[-1], words)
        return ports

    def check(self) -> None:
        """Whatever they were asked, they are up."""
        for running in self._running:
            assert running.process.poll() is None, running.log.read_text()

    def close(self) -> None:
        for running in list(self._running):
            self._stop(running)

    def _wait(self, running: _Running, words: list[str]) -> None:
        port = running.ports[-1]
        here = self._elsewhere.get(port, port)
        has_http = "--grpc" not in words or "--http_port" in words
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (_is_ready(here) if has_http else not _is_free(here)):
            assert running.process.poll() is None, running.log.read_text()
            assert time.monotonic() < deadline_s, running.log.read_text()
            time.sleep(0.1)

    def _stop(self, running: _Running) -> None:
        self._running = [other for other in self._running if other is not running]
        if running.process.poll() is None:
            running.process.terminate()
            try:
                running.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.wait()

    def _shim(self, name: str, line: str) -> None:
        path = self._shims / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


class Terminal:
    """One page's."""

    def __init__(self, servers: Servers, cwd: Path) -> None:
        self._servers = servers
        self._cwd = cwd
        self._ports: set[int] = set()
        self._skipped: set[int] = set()
        for name in LINKED:
            (cwd / name).symlink_to(ROOT / name)
        activate = Path(sys.prefix, "bin/activate")
        (cwd / ".venv/bin").mkdir(parents=True)
        (cwd / ".venv/bin/activate").write_text(f". {activate}\n" if activate.exists() else "")

    def pass_over(self, block: Block, *, with_its_clients: bool) -> None:
        """A block that isn't run. What its servers would be asked then isn't either, or has no server."""
        for command in commands_of(block) if block.language != "python" else []:
            if is_server(command):
                ports = set(ports_of(shlex.split(command, comments=True)))
                self._ports -= ports
                self._skipped = self._skipped | ports if with_its_clients else self._skipped - ports

    def is_passed_over(self, block: Block) -> bool:
        """Whether it asks a server that was passed over."""
        return bool(self._skipped & _asked(block.text))

    def run(self, block: Block, *, timeout_s: float) -> str:
        """What it has printed, errors included.

        Raises:
            AssertionError: it doesn't do what its page says.
        """
        if block.language == "python":
            return self._shell(block, f"python - <<'END_OF_BLOCK'\n{block.text}\nEND_OF_BLOCK", timeout_s)
        said = ""
        waiting: list[str] = []
        for command in commands_of(block):
            if not is_server(command):
                waiting.append(command)
                continue
            said += self._shell(block, "\n".join(waiting), timeout_s)
            waiting = []
            started = set(self._servers.start(command, self._cwd))
            self._ports |= started
            self._skipped -= started
        return said + self._shell(block, "\n".join(waiting), timeout_s)

    def _shell(self, block: Block, script: str, timeout_s: float) -> str:
        if not script.strip():
            return ""
        missing = _asked(script) - self._ports
        assert not missing, f"{block.place}: no block before it on this page starts a server at port {missing.pop()}"
        words = ["bash", "-euo", "pipefail", "-c", self._servers.here(script)]
        code, said = _end_of(words, self._cwd, self._servers.env, timeout_s)
        whole = f"{block.place}: exit code {code} of\n{script}\n\n{said[-4000:]}"
        assert (code != 0) == ("answers" in block.marks), whole
        return said


def _end_of(words: list[str], cwd: Path, env: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output. What is still there after the time ends with all that it has started."""
    process = subprocess.Popen(
        words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, output.decode(errors="replace")


def _asked(script: str) -> set[int]:
    return {int(port) for port in re.findall(r"(?:localhost|127\.0\.0\.1):(\d+)", script)}


def is_server(command: str) -> bool:
    return shlex.split(command, comments=True)[:2] == ["headrace", "serve"]


def ports_of(words: list[str]) -> list[int]:
    """Where a server listens; the last one is for HTTP."""
    named = {flag: int(words[words.index(flag) + 1]) for flag in ("--port", "--http_port") if flag in words}
    return list(({"--port": 8000} | named).values())


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
