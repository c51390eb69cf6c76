from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from headrace import seeds


@given(st.integers(-(2**63), 2**64 - 1))
def test_children_differ_and_repeat(seed: int) -> None:
    children = [seeds.child_seed(seed, index) for index in range(64)]
    assert len(set(children)) == 64
    assert children == [seeds.child_seed(seed, index) for index in range(64)]
    assert children[0] == seed % 2**64  # n = 1 and choice 0 of n = 4 agree
    assert all(0 <= child < 2**64 for child in children)


def test_children_of_neighbouring_seeds_do_not_meet() -> None:
    children = {seeds.child_seed(seed, index) for seed in range(200) for index in range(50)}
    assert len(children) == 200 * 50


def test_mix_is_splitmix64() -> None:
    # first outputs of splitmix64 from state 0, as its authors' reference prints them
    golden = seeds.GOLDEN
    assert [seeds.mix(golden * k) for k in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_random_seeds_differ() -> None:
    assert len({seeds.random_seed() for _ in range(100)}) == 100


@given(st.integers(0, 2**64 - 1))
def test_int64_keeps_the_bits(value: int) -> None:
    signed = seeds.as_int64(value)
    assert -(2**63) <= signed < 2**63
    assert signed % 2**64 == value


def test_brings_no_torch() -> None:
    code = "import sys, headrace.seeds; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
