"""One real server for all of this folder's slow tests: it starts once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.test_real import Real
from tests.server.test_service import until


@pytest.fixture(scope="package")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Real]:
    server = Real(tmp_path_factory.mktemp("compat") / "log", flags=("--tool_parser", "hermes"))
    try:
        assert until(server.is_ready, 120), server.log.read_text()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="package")
def url(real: Real) -> str:
    return real.url
