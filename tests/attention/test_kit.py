"""Every backend of attention over heads keeps the contract of tests/kits/attention.py."""

from __future__ import annotations

import pytest

from headrace import plugins
from headrace.attention.port import AttentionBackend
from tests.kits import attention as kit
from tests.kits.interpreter import HAS_INTERPRETER

INTERPRETED = ("triton", "fixed")


NEEDS_A_PACKAGE = ("flashinfer",)
"""Held by a test file of its own, through a stand-in for the package."""
NAMES = [name for name in plugins.names("attention") if "_" not in name and name not in NEEDS_A_PACKAGE]


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param in INTERPRETED and not HAS_INTERPRETER:
        pytest.skip("on a CPU this backend needs Triton and its interpreter")
    return plugins.load("attention", request.param)()


@pytest.mark.parametrize("seed", range(24))
def test_equals_dense_attention(backend: AttentionBackend, seed: int, request: pytest.FixtureRequest) -> None:
    if seed > 1 and request.node.callspec.params["backend"] in INTERPRETED:
        pytest.skip("the interpreter takes seconds a case: the others run on a GPU")
    kit.check_reference(backend, kit.random_case(seed))


def test_rows_of_the_dummy_block_disturb_nobody(backend: AttentionBackend) -> None:
    kit.check_dropped_rows(backend)


def test_blocks_out_of_the_window_are_not_read(backend: AttentionBackend) -> None:
    kit.check_released_blocks(backend)


def test_copied_blocks_hold_the_same(backend: AttentionBackend) -> None:
    kit.check_copied_blocks(backend)


def test_the_projection_may_be_strided(backend: AttentionBackend) -> None:
    kit.check_strided_projection(backend)
