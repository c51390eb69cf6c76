from __future__ import annotations

import io
import logging
import re

import pytest

from headrace import env, log


@pytest.fixture
def text() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    return now


def test_one_format(text: io.StringIO) -> None:
    log.setup("info", stream=text)
    logging.getLogger("headrace.engine.load").warning("%d tensors missing", 3)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} warning \[engine\] 3 tensors missing\n", text.getvalue()
    )


@pytest.mark.parametrize("level", log.LEVELS)
def test_each_level_shows_itself_and_what_is_more_important(text: io.StringIO, level: str) -> None:
    log.setup(level, stream=text)
    for name, number in log.LEVELS.items():
        log.get("test").log(number, "at %s", name)
    shown = [line.rsplit(" ", 1)[-1] for line in text.getvalue().splitlines()]
    order = list(log.LEVELS)
    assert shown == order[: order.index(level) + 1]
    assert all(f" {name} [test] at {name}" in text.getvalue() for name in shown)


def test_a_second_setup_replaces_the_first(text: io.StringIO) -> None:
    log.setup("debug", stream=io.StringIO())
    log.setup("error", stream=text)
    log.get("x").warning("no")
    log.get("x").error("yes")
    assert text.getvalue().count("\n") == 1


def test_a_level_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="log level 'loud' does not exist: use one of internal_error, error"):
        log.setup("loud")


def test_tracebacks_follow_their_message(text: io.StringIO) -> None:
    log.setup("info", stream=text)
    try:
        raise RuntimeError("inner")
    except RuntimeError:
        log.get("x").exception("outer")
    assert "error [x] outer\nTraceback" in text.getvalue()
    assert text.getvalue().endswith("RuntimeError: inner\n")


def test_long_phases_are_logged(text: io.StringIO, clock: list[float]) -> None:
    log.setup("info", stream=text)
    with log.phase("loading weights"):
        clock[0] += 3.21
    with log.phase("reading config"):
        clock[0] += 0.5
    assert text.getvalue().endswith("info [start] loading weights took 3.2 s\n")
    assert "reading config" not in text.getvalue()


def test_short_and_failed_phases_are_logged_for_debugging(text: io.StringIO, clock: list[float]) -> None:
    log.setup("debug", stream=text)
    with log.phase("reading config", logger=log.get("hub")):
        clock[0] += 0.5
    with pytest.raises(KeyError), log.phase("loading weights"):
        raise KeyError
    assert "debug [hub] reading config took 0.5 s\n" in text.getvalue()
    assert "debug [start] loading weights failed after 0.0 s\n" in text.getvalue()


def test_what_child_processes_show(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(log.ROOT)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    assert log.level_here() == "warning"  # a script that has set up nothing
    monkeypatch.setattr(logger, "level", log.VERBOSE)
    assert log.level_here() == "verbose"
    monkeypatch.setattr(logger, "level", logging.ERROR + 1)
    assert log.level_here() == "internal_error"


def test_a_library_shows_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(log.ROOT)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logger, "propagate", True)
    log.setup_if_asked(None)
    assert not logger.handlers
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "ERROR")
    log.setup_if_asked(env.asked_log_level())
    assert len(logger.handlers) == 1 and log.level_here() == "error"
    log.setup_if_asked("debug")
    assert log.level_here() == "error"
