"""How the compiled kernels are built, cached and loaded, and what happens where they can't be."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.attention.torch import TorchAttention
from headrace.kernels import _native
from headrace.kernels.packed_linear import pack, packed_linear
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.quantise import PLAIN, Quantised
from headrace.kernels.rms_norm import rms_norm
from headrace.quant.none import Dense
from tests.kits.attention import Case, World, assert_close, whole

needs_library = pytest.mark.skipif(_native.library() is None, reason="no C compiler")


def in_children(count: int, work: Callable[[], object]) -> list[int]:
    """Exit statuses of forked children that did `work` at the same time."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


@needs_library
def test_the_number_of_threads_is_torchs_or_its_own() -> None:
    native = _native.library()
    assert native is not None
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert native.hr_count_threads(_native.num_threads()) == threads
    try:
        torch.set_num_threads(1)
        _native.set_num_threads(3)
        assert native.hr_count_threads(_native.num_threads()) == 3
        with pytest.raises(ValueError, match="0 threads: at least 1"):
            _native.set_num_threads(0)
    finally:
        _native.set_num_threads(None)


@needs_library
def test_the_kernels_bring_no_second_openmp_runtime() -> None:
    assert b"gomp" not in _native._built(_native._cache_dir()).read_bytes()


@needs_library
def test_callers_at_the_same_time_and_changing_thread_counts() -> None:
    """One caller has the pool, the other works alone; nobody sees the other's units."""
    weight = pack(torch.randn(300, 40), torch.float32)
    inputs = [torch.randn(count, 40) for count in (1, 5, 40)]
    expected = [packed_linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def call(first_threads: int) -> None:
        for turn in range(600):
            _native.set_num_threads(1 + (first_threads + turn) % 4)
            place = turn % len(inputs)
            if not torch.equal(packed_linear(inputs[place], weight), expected[place]):
                wrong.append(turn)

    callers = [threading.Thread(target=call, args=(count,)) for count in range(2)]
    try:
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        _native.set_num_threads(None)
    assert not wrong


@needs_library
def test_a_forked_child_gets_threads_of_its_own() -> None:
    native = _native.library()
    assert native is not None and native.hr_count_threads(2) == 2

    def count() -> None:
        assert native.hr_count_threads(2) == 2

    assert in_children(1, count) == [0]
    count()


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
    def run(self, packed, *, cache, step, spec, form=PLAIN):
        super().run(packed, cache=cache, step=step, spec=spec)
        return Quantised(paged_attention(packed.heads()[0], cache.k, cache.v, step, spec).flatten(1))


@needs_library
def test_processes_that_build_at_the_same_time_agree(
    tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "SOURCES", tmp_path)
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    assert in_children(3, lambda: ctypes.CDLL(str(_native._built(_native._cache_dir())))) == [0, 0, 0]
    built = _native._built(_native._cache_dir())
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
        built.append(_native._built(_native._cache_dir()))
        assert ctypes.CDLL(str(built[-1])).answer() == value
    assert built[0] == built[2] != built[1]


@needs_library
def test_a_cache_that_cant_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_native, "SOURCES", tmp_path)
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert _native._built_somewhere().is_relative_to(tmp_path)
    assert "they are compiled at each start" in caplog.text


@needs_library
def test_a_refused_source_names_the_error(tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "SOURCES", tmp_path)
    (tmp_path / "broken.c").write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(RuntimeError, match=r"broken\.c.*nothing"):
        _native._built(_native._cache_dir())
