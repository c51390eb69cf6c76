"""Metrics of what few requests have: log-probabilities, and of the memory that was planned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace import wire
from headrace.front.fake import FakeLoop, fake_info

from .harness import Server, running
from .series import value
from .test_operations import post, scrape


def test_perplexity_of_who_wants_to_know(server: Server) -> None:
    before = scrape(server)
    assert post(server, logprobs=1, prompt_logprobs=1, n=2).status_code == 200
    assert post(server).status_code == 200
    after = scrape(server)
    # The fake's chosen tokens all have the log-probability -1.
    for name, count in (("generation", 2), ("prefill", 1)):
        key = f"{name}_perplexity"
        assert value(after, f"{key}_count") - value(before, f"{key}_count") == count
        grown = value(after, f"{key}_sum") - value(before, f"{key}_sum")
        assert abs(grown - count * 2.718281828) < 1e-6


@pytest.mark.parametrize("device", ["cpu, 2 threads", "NVIDIA H200"])
def test_memory_is_what_was_planned(folder: Path, device: str) -> None:
    rows = [
        {"use": "weights", "tier": "device", "bytes": 300},
        {"use": "KV: full attention, 3 layers", "tier": "device", "bytes": 200},
        {"use": "reserve", "tier": "device", "bytes": 100},
        {"use": "KV, host tier", "tier": "host", "bytes": 70},
    ]
    startup = wire.Startup(memory={"device": device, "rows": rows})
    loop = FakeLoop(msgspec.structs.replace(fake_info(), startup=startup))
    with running(folder, loop=loop) as server:
        series = scrape(server)
    found = [value(series, f"{name}_memory_usage_bytes") for name in ("gpu", "pinned")]
    assert found == ([0, 0] if device.startswith("cpu") else [500, 70])
    (model,) = (dict(labels) for name, labels in series if name == "trtllm_model_config_info")
    assert model["gpu_type"] == device
