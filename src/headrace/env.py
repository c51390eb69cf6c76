"""Every environment variable that Headrace reads, with its default and meaning; no other module reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    kind: str
    default: str
    meaning: str


CACHE = Variable("HEADRACE_CACHE", "folder", "~/.cache/headrace", "Where fetched models and measured choices are kept.")
LOG_LEVEL = Variable("HEADRACE_LOG_LEVEL", "log level", "info", "Least important messages shown; a flag goes first.")
API_KEY = Variable("HEADRACE_API_KEY", "text", "", "Key that clients have to send; several are separated by commas.")
FLA = Variable(
    "HEADRACE_FLA", "auto, always or never", "auto",
    "Prompts of delta-rule layers on the kernels of fla-core, on a GPU: auto goes by measurements.",
)  # fmt: skip
XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME", "folder", "~/.cache", "The user's cache folder, in which HEADRACE_CACHE lies by default."
)

METRICS_FOLDER = Variable(
    "PROMETHEUS_MULTIPROC_DIR", "folder", "", "Set by the server, for its HTTP processes: where they add up metrics."
)

OTLP_TRACES_PROTOCOL = Variable(
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "text", "grpc", "How traces are sent: grpc or http/protobuf."
)
OTLP_PROTOCOL = Variable("OTEL_EXPORTER_OTLP_PROTOCOL", "text", "", "The same, where the variable above is not set.")

VARIABLES: tuple[Variable, ...] = (
    CACHE, LOG_LEVEL, API_KEY, FLA, XDG_CACHE_HOME, METRICS_FOLDER, OTLP_TRACES_PROTOCOL, OTLP_PROTOCOL,
)  # fmt: skip


def cache_dir() -> Path:
    """The cache folder, absolute; it need not exist yet.

    Raises:
        ValueError: it begins with the home folder of a user that does not exist.
    """
    text = _text(CACHE)
    path = Path(text) if text else Path(_text(XDG_CACHE_HOME) or "~/.cache") / "headrace"
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"{path} is below no user's home: set {CACHE.name} to a folder") from None


def log_level() -> str:
    """The log level's name, lower case; `headrace.log.setup` refuses one that does not exist."""
    return (_text(LOG_LEVEL) or LOG_LEVEL.default).lower()


def asked_log_level() -> str | None:
    """None if the variable isn't set."""
    return log_level() if _text(LOG_LEVEL) else None


def api_keys() -> list[str]:
    """API keys; empty when the server is open."""
    return [key.strip() for key in _text(API_KEY).split(",") if key.strip()]


def fla() -> str:
    """`auto`, `always` or `never`.

    Raises:
        ValueError: another word.
    """
    wanted = (_text(FLA) or FLA.default).lower()
    if wanted not in ("auto", "always", "never"):
        raise ValueError(f"{FLA.name} must be auto, always or never, not {wanted!r}")
    return wanted


def metrics_folder() -> str:
    """Empty where one process has all metrics."""
    return _text(METRICS_FOLDER)


def otlp_traces_protocol() -> str:
    """How traces are sent to their collector."""
    return _text(OTLP_TRACES_PROTOCOL) or _text(OTLP_PROTOCOL) or OTLP_TRACES_PROTOCOL.default


def share_metrics(folder: str | None) -> None:
    """Before prometheus-client is imported, which reads it then. None: metrics are this process's own; whatever else
    the variable names is another program's."""
    os.environ.pop(METRICS_FOLDER.name, None)
    if folder is not None:
        os.environ[METRICS_FOLDER.name] = folder


def apply_overrides(overrides: Mapping[str, str] | None) -> None:
    """Set the variables of `env_overrides`. Call it before anything reads the environment."""
    os.environ.update(overrides or {})


def _text(variable: Variable) -> str:
    return os.environ.get(variable.name, "").strip()
