"""A server for a measurement: one that can't start is told in its own words. docs/tune.md has one that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tune.served import served


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    config, log = tmp_path / "served.yaml", tmp_path / "server.log"
    config.write_text("model: smollm2\nmax_batch_size: none at all\n")
    with pytest.raises(RuntimeError, match=r"has ended with code 2: .*max_batch_size") as caught, served(config, log):
        pytest.fail("it can't be ready")
    assert str(log) in str(caught.value) and "max_batch_size" in log.read_text()
