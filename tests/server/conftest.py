from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .browser import Browser, chromium
from .field_kit import Served, serve
from .harness import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that echoes prompts, shared by the tests of a file."""
    with running(tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One whose fields are tried."""
    with serve(tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Of texts that are JSON or not."""
    with httpx.Client(timeout=20, headers={"content-type": "application/json"}) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where screenshots go: HEADRACE_TEST_SHOTS names a folder that keeps them."""
    return Path(os.environ.get("HEADRACE_TEST_SHOTS") or tmp_path)
