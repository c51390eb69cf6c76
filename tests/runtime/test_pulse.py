"""Silence is counted in turns of the watcher, from the first sign of life on."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.runtime.pulse import PulseWatch, start_pulse
from tests.server.test_service import until


def test_who_is_silent(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("lives", "stopped", "starts")]
    watch = PulseWatch(paths)
    for turn in range(10):
        os.utime(paths[0], (turn, turn)) if turn else paths[0].touch()
        if turn == 0:
            paths[1].touch()
        watch.look(0.5)
    assert watch.silent(4.0) == [1], "one that hasn't begun is only starting"
    assert watch.silent(6.0) == []
    os.utime(paths[1], (99, 99))
    watch.look(0.5)
    assert 1 not in watch.silent(0.5)


def test_a_pulse(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    start_pulse(path)
    assert until(path.exists)
    first = path.stat().st_mtime
    assert until(lambda: path.stat().st_mtime > first)
