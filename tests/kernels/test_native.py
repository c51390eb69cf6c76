"""How the compiled kernels are built, cached and loaded, and what happens where they can't be."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.attention.torch import TorchAttention
from headrace.kernels import _native
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.rms_norm import rms_norm
from headrace.quant.none import Dense
from tests.kits.attention import Case, World, assert_close, whole

needs_library = pytest.mark.skipif(_native.library() is None, reason="no C compiler")

BUILD = """
import sys
from pathlib import Path
from headrace.kernels import _native
_native.SOURCES = Path(sys.argv[1])
print(_native._built(with_openmp=False))
"""


@needs_library
def test_one_openmp_runtime_and_torchs_number_of_threads() -> None:
    native = _native.library()
    assert native is not None
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in maps if Path(line.split()[-1]).name.startswith(("libgomp", "libiomp"))}
    assert len(runtimes) == 1 and "torch" in runtimes.pop()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert native.hr_count_threads(_native.num_threads()) == threads


def test_without_a_compiler_there_is_one_warning_and_the_twins_work(
    tmp_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    _native.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            out = rms_norm(torch.ones(2, 4), torch.ones(4), 0.0)
            assert isinstance(out, torch.Tensor) and torch.equal(out, torch.ones(2, 4))
            weight = torch.randn(6, 4)
            prepared = Dense().prepare(weight, None)
            assert torch.equal(Dense().rows(prepared, torch.tensor([5, 0])), weight[[5, 0]])
            world = World(Case())
            assert_close(world, world.attend(_Launcher(), whole(world.case)))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "slower torch code is used" in caplog.text and not list(tmp_cache.rglob("*.so"))
    finally:
        _native.library.cache_clear()


class _Launcher(TorchAttention):
    def run(self, q, k, v, *, cache, step, spec):
        super().run(q, k, v, cache=cache, step=step, spec=spec)
        return paged_attention(q, cache.k, cache.v, step, spec)


@needs_library
def test_processes_that_build_at_the_same_time_agree(tmp_path: Path, tmp_cache: Path) -> None:
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0] and len(paths) == 1
    built = Path(paths.pop())
    assert [path.name for path in built.parent.iterdir()] == [built.name], "scratch was left behind"
    assert not hasattr(ctypes.CDLL(str(built)), "answer"), "only exported symbols are visible"


@needs_library
def test_a_changed_source_is_built_anew(tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "SOURCES", tmp_path)
    source = tmp_path / "answer.c"
    text = '__attribute__((visibility("default"))) int answer(void) {{ return {}; }}\n'
    built = []
    for value in (41, 42, 41):
        source.write_text(text.format(value))
        built.append(_native._built(with_openmp=False))
        assert ctypes.CDLL(str(built[-1])).answer() == value
    assert built[0] == built[2] != built[1]


@needs_library
def test_a_refused_source_names_the_error(tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "SOURCES", tmp_path)
    (tmp_path / "broken.c").write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(RuntimeError, match=r"broken\.c.*nothing"):
        _native._built(with_openmp=False)
