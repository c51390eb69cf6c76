"""What this machine has: main memory, and disks that blocks could be kept on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MAX_FILES_COUNTED = 100_000


def total_memory_bytes() -> int:
    """Main memory of the machine; less where the process's control group (version 2) is given less."""
    limit = _control_group("memory.max")
    return _meminfo("MemTotal") if limit is None else min(_meminfo("MemTotal"), limit)


def free_memory_bytes() -> int:
    """What the process may still take of it."""
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    available = _meminfo("MemAvailable")
    return available if limit is None or used is None else min(available, max(limit - used, 0))


def disk_problem(folder: str, size_bytes: int) -> str | None:
    """Why `size_bytes` can't be kept in a folder; None when they can. What lies in it may be replaced, so it counts."""
    path = Path(folder)
    if not path.exists():
        return f"'{folder}' is no folder: create it first"
    if not path.is_dir():
        return f"'{folder}' is a file: name a folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"'{folder}' can't be written: change its permissions, or name another folder"
    free_bytes = shutil.disk_usage(path).free
    if size_bytes > free_bytes and size_bytes > free_bytes + _used_bytes(path):
        return f"'{folder}' has {free_bytes:,} bytes free, less than the {size_bytes:,} of disk_cache_size"
    return None


def _used_bytes(folder: Path) -> int:
    """Of the files below a folder, as far as they can be seen."""
    total_bytes = num_files = 0
    for place, _, names in os.walk(folder):
        for name in names:
            num_files += 1
            try:
                total_bytes += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
        if num_files > MAX_FILES_COUNTED:
            break
    return total_bytes


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo names no {name}")


def _control_group(name: str) -> int | None:
    """A number of the process's own control group, None without a limit."""
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
