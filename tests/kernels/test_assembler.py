"""Which ptxas assembles kernels."""

from __future__ import annotations

import os

import pytest
import torch

from headrace.kernels._assembler import VARIABLE, choose_assembler, is_better, release_of


@pytest.mark.parametrize(
    ("release", "usual", "cuda", "expected"),
    [
        ("12.9", "12.8", "13.0", True),
        ("12.9", "12.8", "12.6", True),
        ("13.1", "12.8", "13.0", True),
        ("13.1", "12.8", "12.8", False),
        ("13.4", "12.9", "13.0", True),
        ("13.4", "12.9", "12.9", False),
        ("13.1", "12.9", "13.0", False),
        ("12.8", "12.8", "13.0", False),
    ],
)
def test_the_newer_one_where_the_usual_one_is_faulty(release: str, usual: str, cuda: str, expected: bool) -> None:
    assert is_better(release_of(release), than=release_of(usual), cuda=release_of(cuda)) is expected


@pytest.mark.gpu
def test_kernels_are_not_assembled_by_the_faulty_one() -> None:
    from triton import knobs

    import headrace.kernels._triton_chain  # noqa: F401  (chooses)

    assert release_of(knobs.nvidia.ptxas.version) != (12, 8)


def test_another_triton_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose second assembler is not there must not stop kernels from being imported."""
    knobs = pytest.importorskip("triton.knobs")

    class OneAssembler:
        @property
        def ptxas(self) -> object:
            raise RuntimeError("Cannot find ptxas-blackwell")

    monkeypatch.setattr(knobs, "nvidia", OneAssembler())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv(VARIABLE, raising=False)
    choose_assembler()
    assert VARIABLE not in os.environ
