"""Several server processes on one port, with a tiny model behind them: what a client sees is one server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.server.run import bind
from tests.cli.test_bad_input import checkpoint as checkpoint

from .series import Series, series_of, value
from .test_service import until

pytestmark = pytest.mark.slow  # each server starts three processes


class Several:
    def __init__(self, model: Path, folder: Path, *words: str, scheme: str = "http") -> None:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.log = folder / "log"
        command = [sys.executable, "-m", "headrace.cli.main", "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--engine_threads", "1", "--set", "kv_cache_config.max_tokens=4096", *words]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with httpx.Client(timeout=20) as client:  # a connection of its own: any process may take it
            return client.get(self.url + path, **options)

    def complete(self, **body: Any) -> httpx.Response:
        with httpx.Client(timeout=20) as client:
            return client.post(f"{self.url}/v1/completions", json={"prompt": "ab", "max_tokens": 3, **body})

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def fronts(self) -> list[int]:
        """Ids of the further server processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        lines = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        return [int(child) for child, line in lines.items() if b"front_process" in line]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def several(checkpoint: Path, tmp_path: Path) -> Iterator[Several]:
    server = Several(checkpoint, tmp_path, "--num_serve_frontends", "2")
    try:
        assert until(server.is_ready, 150), server.log.read_text()
        yield server
    finally:
        server.end()


def test_they_are_one_server(several: Several) -> None:
    """Counts are sums whichever process is asked; a signal ends all of them well."""
    fronts = several.fronts()
    assert len(fronts) == 1
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: several.complete().status_code, range(48)))
    assert answers == [200] * 48
    seen = {server_of(several) for _ in range(40)}
    assert len(seen) <= 2
    for _ in range(6):
        series = series_of(several.get("/metrics").text)
        assert value(series, "requests_accepted_total") == 48
        assert value(series, "requests_total", finish_reason="length") == 48
        assert value(series, "time_to_first_token_seconds_count") == 48
        assert value(series, "num_requests_completed_total") == 48
    ended_in_all_ways_adds_up(several)
    several.process.send_signal(signal.SIGHUP)
    assert several.process.wait(20) == 0
    assert "SIGHUP: stopping" in several.log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in fronts)


def ended_in_all_ways_adds_up(several: Several) -> None:
    """Refused ones aren't accepted; whoever was accepted has one end, and a first token or none."""
    assert [several.complete(max_tokens=-1).status_code for _ in range(5)] == [400] * 5
    assert [several.complete(max_tokens=1).status_code for _ in range(5)] == [200] * 5
    for number in range(12):
        with (
            httpx.Client(timeout=20) as client,
            client.stream(
                "POST",
                f"{several.url}/v1/completions",
                json={"prompt": f"ab{number}", "max_tokens": 400, "ignore_eos": True, "stream": True},
            ) as answer,
        ):
            if number % 2:
                next(answer.iter_lines())  # the other half leaves before it reads anything

    def series() -> Series:
        return series_of(several.get("/metrics").text)

    def ended(found: Series) -> float:
        return sum(count for (name, _), count in found.items() if name == "trtllm_requests_total")

    assert until(lambda: ended(series()) == 48 + 5 + 12, 20)
    for _ in range(4):
        found = series()
        assert value(found, "requests_accepted_total") == ended(found) == 48 + 5 + 12
        assert value(found, "request_error_total", http_code="400") == 5
        aborted = value(found, "requests_total", finish_reason="abort")
        assert 6 <= aborted <= 12
        assert value(found, "num_requests_completed_total") + aborted >= 48 + 5 + 12
        first = value(found, "time_to_first_token_seconds_count")
        assert 48 + 5 + 6 <= first <= 48 + 5 + 12
        assert value(found, "e2e_request_latency_seconds_count") <= 48 + 5 + 12


def server_of(several: Several) -> int:
    return several.get("/stats").json()["server"]["acceptedRequests"]


def test_one_that_dies_ends_all(several: Several) -> None:
    os.kill(several.fronts()[0], signal.SIGKILL)
    assert several.process.wait(20) == 1
    assert several.log.read_text().strip().splitlines()[-1] == "headrace: server process 2 was killed by signal 9"


def test_tls_keys_from_a_file_and_a_trace(checkpoint: Path, tmp_path: Path) -> None:
    import trustme

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = [tmp_path / name for name in ("chain.pem", "key.pem", "keys")]
    certificate.cert_chain_pems[0].write_to_path(str(files[0]))
    certificate.private_key_pem.write_to_path(str(files[1]))
    files[2].write_text("# two tenants\nfirst-key\n\nsecond-key\n")
    traces = tmp_path / "traces"
    traces.mkdir()
    words = ["--ssl_certfile", files[0], "--ssl_keyfile", files[1], "--api_key_file", files[2], "--profile_dir", traces]
    server = Several(checkpoint, tmp_path, *map(str, words), scheme="https")
    try:
        import ssl

        context = ssl.create_default_context()
        authority.configure_trust(context)
        with httpx.Client(verify=context, timeout=20, base_url=server.url) as client:

            def is_ready() -> bool:
                assert server.process.poll() is None, server.log.read_text()
                try:
                    return client.get("/health/ready").status_code == 200
                except httpx.TransportError:
                    return False

            assert until(is_ready, 150), server.log.read_text()
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer second-key"
            assert client.post("/start_profile", json={}).status_code == 200
            assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200
            stopped = client.post("/stop_profile")
            assert stopped.status_code == 200, stopped.text
            assert [file.name for file in traces.iterdir()] == stopped.json()["files"]
            shown = client.get("/server_info").text
            assert "first-key" not in shown and "first-key" not in server.log.read_text()
            assert json.loads(shown)["configuration"]["profile_dir"] == str(traces)
    finally:
        server.end()
