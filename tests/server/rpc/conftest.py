"""A gRPC server in place of the HTTP one, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import Client, Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("model"), step_s=0.001) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with server.client() as found:
        yield found
