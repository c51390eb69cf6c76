"""Attention over residuals: the torch twin against its formula, the Triton form against the twin."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.depth_mix import depth_mix, depth_mix_twin
from tests.kits.interpreter import DEVICES

EPS = 1e-5
TOKENS, PLACES = 3, 5


def drawn(dtype: torch.dtype, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sums, weight, what is owed)"""
    draw = torch.Generator().manual_seed(features)
    sums = torch.randn(TOKENS, PLACES, features, generator=draw).to(dtype)
    weight = torch.randn(features, generator=draw) * 0.3
    return sums, weight, torch.randn(TOKENS, features + 3, generator=draw).to(dtype)[:, 2 : features + 2]


def expected(sums: Tensor, weight: Tensor, count: int) -> Tensor:
    """In float64, without a formula in common."""
    seen = sums[:, :count].double()
    normed = torch.nn.functional.rms_norm(seen, seen.shape[-1:], weight.double(), EPS)
    return torch.einsum("tp,tph->th", torch.softmax(normed.sum(-1), 1), seen)


CASES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "one more is owed": {"added": True},
    "another sum begins": {"added": True, "replaces": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 2, PLACES])
def test_formula(case: str, count: int) -> None:
    sums, weight, owed = drawn(torch.float32, 40)
    options = {**CASES[case], "added": owed if "added" in CASES[case] else None}
    wanted = sums.clone()
    if options["added"] is not None:
        wanted[:, 0] = owed if "replaces" in options else sums[:, 0] + owed
    out = depth_mix(sums, weight, EPS, count=count, **options)
    assert torch.equal(sums, wanted), "place 0 is brought up to date, the others stay"
    torch.testing.assert_close(out.double(), expected(wanted, weight, count), atol=1e-5, rtol=1e-5)


def test_a_token_depends_on_itself() -> None:
    sums, weight, _ = drawn(torch.float32, 24)
    alone = depth_mix(sums[1:2].clone(), weight, EPS, count=3)
    assert torch.equal(depth_mix(sums, weight, EPS, count=3)[1:2], alone)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [7, 200])
def test_triton(device: str, dtype: torch.dtype, features: int) -> None:
    from headrace.kernels._triton_depth_mix import launch_depth_mix

    for case, stated in CASES.items():
        for count in (1, 2, PLACES):
            sums, weight, owed = drawn(dtype, features)
            added = owed if "added" in stated else None
            replaces = "replaces" in stated
            twin, own = sums.clone(), sums.clone().to(device)
            wanted = depth_mix_twin(twin, weight, EPS, count=count, added=added, replaces=replaces)
            on_device = None if added is None else added.to(device)
            got = launch_depth_mix(own, weight.to(device), EPS, count=count, added=on_device, replaces=replaces)
            assert torch.equal(own.cpu(), twin), case
            step = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(got.cpu().float(), wanted.float(), atol=step, rtol=step)


SCRIPT = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.kernels._triton_depth_mix import _depth_mix_kernel as kernel

for count, has_added in ((1, True), (9, False), (9, True)):
    constants = dict(COUNT=count, HAS_ADDED=has_added, REPLACES=False, BLOCK=8192, CHAINED=True)
    types = dict(depths="*bf16", added="*bf16", weight="*fp32", out="*bf16", eps="fp32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = [place for place, name in enumerate(names) if name in types and name != "eps" or "stride" in name]
    source = ASTSource(fn=kernel, signature=signature, attrs={(place,): [["tt.divisibility", 16]] for place in places},
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=16, launch_pdl=True))
    assert "st.local" not in built.asm["ptx"], "registers are spilled"
print("all compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_compiles_for_hopper() -> None:
    """With the sizes of Kimi-K3."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "all compiled"
