from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that echoes prompts, shared by the tests of a file."""
    with running(tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
