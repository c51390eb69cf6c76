"""The compiled CPU kernels: built once from `native/*.c` with the system's C compiler, kept in the user's cache.

Without a compiler, or where the build fails, `library()` is None and every launcher uses its torch twin.

A kernel's arguments are 64-bit integers (pointers, sizes, strides in elements, flags) and doubles. ctypes gives up
the GIL during a call.

The kernels have a few threads of their own (`native/pool.c`). Torch's OpenMP pool is no base for a server: a region
ends when every thread of the team has been scheduled, so with a core busy elsewhere each of a step's hundreds of
regions waits for a time slice, and the threads burn the cores meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.env import cache_dir as _cache_dir

__all__ = ["dtype_flag", "library", "num_threads", "processor_features", "set_num_threads"]

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    "-O2",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
)
COMPILE_TIMEOUT_S = 120


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, built first if this machine has none yet; None where they can't be had."""
    try:
        return _declare(_loaded(_built_somewhere()))
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
        log.warning("CPU kernels are not compiled, slower torch code is used: %s", error)
        return None


def num_threads() -> int:
    """Threads that a kernel uses, the caller's included: torch's setting unless `set_num_threads` was called."""
    return _threads.count or torch.get_num_threads()


def set_num_threads(count: int | None) -> None:
    """Give the kernels a setting of their own, so that torch's can be 1 and its pool stay asleep. None: torch's."""
    if count is not None and count < 1:
        raise ValueError(f"{count} threads: at least 1 is needed")
    _threads.count = count


@dataclass
class _Threads:
    count: int | None = None


_threads = _Threads()


def dtype_flag(tensor: Tensor) -> int | None:
    """1 for bfloat16, 0 for float32, None for what the kernels don't take."""
    return _DTYPE_FLAGS.get(tensor.dtype)


_DTYPE_FLAGS = {torch.bfloat16: 1, torch.float32: 0}


@cache
def processor_features() -> frozenset[str]:
    """Instruction sets by the names the Linux kernel gives them ("avx2", "avx512_bf16", "amx_bf16")."""
    return frozenset(word for line in _processor().splitlines() for word in line.split(":")[-1].split())


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:  # a file that was cut off, or of another system
        path.unlink()
        loaded = ctypes.CDLL(str(_built_somewhere()))
    if not path.is_relative_to(_cache_dir()):
        shutil.rmtree(path.parents[2], ignore_errors=True)  # what is loaded stays loaded
    return loaded


def _built_somewhere() -> Path:
    """In the cache; where that can't be written, in a temporary folder, for this process only."""
    try:
        return _built(_cache_dir())
    except OSError as error:
        log.warning("the CPU kernels can't be kept in %s (%s): they are compiled at each start", _cache_dir(), error)
        return _built(Path(tempfile.mkdtemp(prefix="headrace-")))


def _built(cache: Path) -> Path:
    """Path of the shared library for this source, these flags and this processor."""
    flags = [*FLAGS, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"]
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256()
    for path in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.read_bytes())
    digest.update("\0".join([*flags, _processor()]).encode())
    folder = cache / "native" / digest.hexdigest()[:32]
    library_path = folder / "kernels.so"
    if not _is_whole(library_path):
        folder.mkdir(parents=True, exist_ok=True)
        _build(sources, flags, library_path)
    return library_path


def _is_whole(path: Path) -> bool:
    """Whether the file is there to its end: one that was cut off would kill the process that maps it (SIGBUS)."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
        (offset,) = struct.unpack_from("<Q", head, 0x28)
        entry_bytes, num_entries = struct.unpack_from("<HH", head, 0x3A)
    except (OSError, struct.error):
        return False
    # ELF, 64 bits, as its specification lays it out: the table of sections comes last.
    return path.stat().st_size >= offset + entry_bytes * num_entries


def _build(sources: list[Path], flags: list[str], target: Path) -> None:
    """Compile the sources side by side, link, and put the result in place at once: other processes may do the same."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0]:
        raise RuntimeError("no C compiler found (install gcc, or set CC)")
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"no C compiler {compiler[0]!r} (CC names it)")
    log.info("compiling the CPU kernels (once on this machine)")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{path.stem}.o" for path in sources]
        _run([[*compiler, *flags, "-c", str(path), "-o", str(made)] for path, made in zip(sources, objects)])
        linked = Path(scratch) / target.name
        _run([[*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked), "-lm"]])
        os.replace(linked, target)


def _run(commands: list[list[str]]) -> None:
    """Run commands side by side; the first that failed is an error."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=COMPILE_TIMEOUT_S)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, command, output in zip(running, commands, outputs):
        if process.returncode != 0:
            if os.strerror(errno.ENOSPC) in output:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise RuntimeError(f"{command[0]} failed: {_first_error(output)}")


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
    return lines[0] if lines else "no message"


def _processor() -> str:
    """Model and instruction sets: a cache that several machines share holds a build for each."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    found: dict[str, str] = {}
    for line in info.read_text().splitlines():
        key = line.split(":")[0].strip()
        if key in wanted:
            found.setdefault(key, line)
    return "\n".join(sorted(found.values()))


_KINDS = {"i": ctypes.c_int64, "d": ctypes.c_double, "b": ctypes.c_char_p}
_SIGNATURES = {
    # i: integer or address, d: double, b: packed bytes; all return an integer
    "hr_count_threads": "i",
    "hr_rms_norm": "i" * 9 + "d" + "i" * 4,
    "hr_rope": "i" * 15,
    "hr_act_mul": "i" * 8,
    "hr_kv_write": "i" * 19,
    "hr_paged_attention": "b",
    "hr_linear": "i" * 12,
    "hr_linear_pack": "i" * 8,
    "hr_linear_packed_size": "ii",
    "hr_linear_rows": "i" * 6,
    "hr_grouped_linear": "i" * 15,
    "hr_grouped_pack": "i" * 10,
    "hr_grouped_packed_size": "i" * 6,
    "hr_grouped_rows": "i" * 9,
}


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, kinds in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = ctypes.c_int64
        function.argtypes = [_KINDS[kind] for kind in kinds]
    return loaded
