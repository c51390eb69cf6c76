"""Logging: one format on standard error, the levels of `--log_level`, and a line for each long phase."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Generator
from typing import TextIO

TRACE = 5
VERBOSE = 15

LEVELS: dict[str, int] = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": VERBOSE,
    "debug": logging.DEBUG,
    "trace": TRACE,
}
"""Names of `--log_level`, least talkative first."""

_NAMES = {number: name for name, number in LEVELS.items()}
LONG_PHASE_S = 1.0
ROOT = "headrace"


class _Formatter(logging.Formatter):
    """`time level [component] message`, where the component is the room: `headrace.engine.load` is `engine`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = record.name.split(".")
        component = parts[1] if len(parts) > 1 and parts[0] == ROOT else parts[0]
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = _NAMES.get(record.levelno, record.levelname.lower())
        text = f"{clock}.{int(record.msecs):03d} {level} [{component}] {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def setup(level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send Headrace's log to `stream` (standard error if none); a second call replaces the first.

    Raises:
        ValueError: for a level that does not exist.
    """
    if level not in LEVELS:
        raise ValueError(f"log level '{level}' does not exist: use one of {', '.join(LEVELS)}")
    logging.addLevelName(TRACE, "TRACE")
    logging.addLevelName(VERBOSE, "VERBOSE")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter())
    logger = logging.getLogger(ROOT)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(LEVELS[level])
    logger.propagate = False


def level_here() -> str:
    """What this process shows, for the processes that it starts: what was set up, else what Python has by default."""
    number = logging.getLogger(ROOT).getEffectiveLevel()
    return next(name for name, shown in reversed(LEVELS.items()) if shown >= number or name == "internal_error")


def setup_if_asked(level: str | None) -> None:
    """For a library: its caller decides, or an environment variable."""
    if level is not None and not logging.getLogger(ROOT).handlers:
        setup(level)


def get(component: str) -> logging.Logger:
    """The logger of a room, for example `get("engine")`."""
    return logging.getLogger(f"{ROOT}.{component}")


@contextlib.contextmanager
def phase(name: str, *, logger: logging.Logger | None = None) -> Generator[None, None, None]:
    """Log how long a phase of the start took: at info from one second up, at debug below.

    `name` reads as what is being done, for example "loading weights". A phase that fails is logged too.
    """
    log = logger or get("start")
    begin = time.monotonic()
    try:
        yield
    except BaseException:
        log.debug("%s failed after %.1f s", name, time.monotonic() - begin)
        raise
    took_s = time.monotonic() - begin
    log.log(logging.INFO if took_s >= LONG_PHASE_S else logging.DEBUG, "%s took %.1f s", name, took_s)
