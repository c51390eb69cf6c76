"""`headrace serve --grpc` of several processes, with a tiny model behind them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.server.run import bind
from tests.cli.test_bad_input import checkpoint as checkpoint

from ..series import series_of, value
from ..test_fronts import Several
from ..test_service import until
from .harness import Client, health, request

pytestmark = pytest.mark.slow  # the server starts three processes


class SeveralRpc(Several):
    def __init__(self, model: Path, folder: Path) -> None:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        super().__init__(model, folder, "--grpc", "--num_serve_frontends", "2", "--http_port", str(port))
        self.address = self.url.removeprefix("http://")
        self.url = f"http://127.0.0.1:{port}"

    def generate(self, **options: Any) -> list[Any]:
        """Over a connection of its own, which any process may take."""
        with grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            return Client(channel).generate(request([5, 6, 7], **options), timeout=60)


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[SeveralRpc]:
    found = SeveralRpc(checkpoint, tmp_path)
    try:
        assert until(found.is_ready, 150), found.log.read_text()
        yield found
    finally:
        found.end()


def test_they_are_one_server(server: SeveralRpc) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.generate(max_tokens=3), range(24)))
    outputs = {tuple(answer[-1].complete.output_token_ids) for answer in answers}
    assert len(outputs) == 1
    series = series_of(server.get("/metrics").text)
    assert value(series, "requests_accepted_total") == value(series, "time_to_first_token_seconds_count") == 24
    assert sum(number for (name, _), number in series.items() if name == "trtllm_requests_total") == 24
    with grpc.insecure_channel(server.address) as channel:
        client = Client(channel)
        assert health(client) == 1
        call = client.call("Generate", request([5, 6, 7], max_tokens=100, ignore_eos=True, streaming=True))
        next(call)
        server.process.send_signal(signal.SIGTERM)
        assert [*call][-1].complete.finish_reason == "length"
    assert server.process.wait(30) == 0
