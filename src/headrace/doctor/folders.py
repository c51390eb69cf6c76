"""The folders that things are kept in: whether they can be written, what lies below them, how much is free."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from headrace import env
from headrace.doctor.facts import Folder

KEPT = (
    ("models and CPU kernels", env.CACHE.name, ""),
    ("compiled Triton kernels", "TRITON_CACHE_DIR", "~/.triton/cache"),
    ("models of the hub", "HF_HOME", "~/.cache/huggingface"),
    ("sockets and scratch files", "TMPDIR", ""),
)
"""Purpose, variable, and where it is without the variable; "" is asked for."""


def gather_folders(mounts: str = "/proc/self/mountinfo") -> tuple[Folder, ...]:
    table = _mounts(mounts)
    return tuple(_folder(purpose, variable, _place(variable, default), table) for purpose, variable, default in KEPT)


def _place(variable: str, default: str) -> Path:
    if variable == env.CACHE.name:
        return env.cache_dir()
    if variable == "TMPDIR":
        return Path(tempfile.gettempdir())
    return Path(os.environ.get(variable) or default).expanduser().absolute()


def _folder(purpose: str, variable: str, path: Path, mounts: list[tuple[str, str, str]]) -> Folder:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free_bytes = shutil.disk_usage(there).free
        real = str(there.resolve())
    except OSError:
        return Folder(purpose, variable, str(path), False, 0)
    below = [mount for mount in mounts if real == mount[0] or real.startswith(mount[0].rstrip("/") + "/")]
    _, file_system, options = max(below, key=lambda mount: len(mount[0]), default=("/", "", ""))
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Folder(
        purpose, variable, str(path), is_writable, free_bytes, file_system, "noexec" not in options.split(",")
    )


def _mounts(path: str) -> list[tuple[str, str, str]]:
    """(place, file system, options) of each mount (proc(5), mountinfo)."""
    found: list[tuple[str, str, str]] = []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        before, separator, after = line.partition(" - ")
        words, rest = before.split(), after.split()
        if separator and len(words) >= 6 and rest:
            found.append((words[4].replace("\\040", " "), rest[0], words[5]))
    return found
