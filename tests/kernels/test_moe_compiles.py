"""The experts' kernels compile for Hopper, which needs no GPU and finds what the interpreter lets pass."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import re
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.kernels.moe import _triton_grouped as grouped, _triton_route as route

STRIDES = "x_stride x_scale_stride w_expert_stride w_row_stride scale_expert_stride scale_row_stride out_stride"

def build(kernel, types, constants, **options):
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names)
                  if types[name].startswith("*") or name in STRIDES.split()}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "st.local" not in built.asm["ptx"], "registers are spilled"
    assert built.metadata.shared <= 227 * 1024
    return built

ids = dict(ids="*i32", pairs="*i32", experts="*i32", counts="*i32", places="*i32")
build(route._sort_kernel, ids, dict(EXPERTS=128, ROWS=16, BLOCK=1024), num_warps=8)
for scoring, groups in (("softmax", 1), ("sigmoid", 8), ("sqrt_softplus", 1), ("softmax_top", 1)):
    build(route._route_kernel, dict(logits="*bf16", correction="*fp32", ids="*i32", weights="*fp32", scaling="fp32"),
          dict(EXPERTS=256, TOP_K=8, CHOICES=8, SCORING=scoring, NORMALISE=True, GROUPS=groups, TOP_GROUPS=1,
               IS_MAX=False, HAS_CORRECTION=groups > 1), num_warps=1)
build(grouped._combine_kernel, dict(results="*bf16", ids="*i32", out="*bf16"), dict(TOP_K=8, TILE=1024))
KINDS = {"plain": ("*bf16", "*bf16", "*bf16", "none", "none"),
         "output": ("*fp8e4nv", "*fp8e4nv", "*fp32", "output", "row"),
         "block": ("*fp8e4nv", "*fp8e4nv", "*fp32", "block", "block"),
         "one block": ("*fp8e4nv", "*fp8e4nv", "*fp32", "one_block", "block"),
         "mxfp4": ("*bf16", "*u8", "*u8", "none", "none")}
for kind, (x, weight, scale, scales, x_scales) in KINDS.items():
    for rows in (16, 128):
        is_mxfp4 = kind == "mxfp4"
        types = dict(x=x, weight=weight, out="*bf16", bias="*bf16", x_scale="*fp32", w_scale=scale, factors="*fp32",
                     tile_pairs="*i32", tile_experts="*i32", limit="fp32", alpha="fp32", up_offset="fp32")
        constants = dict(
            PAIRS_A_ROW=8, ROWS=rows, OUTPUTS=64,
            INPUTS=64 if kind in ("plain", "mxfp4") else 128,
            SCALES=scales, X_SCALES=x_scales, IS_MXFP4=is_mxfp4, IS_EVEN=True, WEIGHTS_FIRST=rows == 16,
            KIND="silu", IS_GATED=True,
            IS_INTERLEAVED=is_mxfp4, HAS_LIMIT=is_mxfp4, HAS_BIAS=is_mxfp4, HAS_FACTORS=False,
            COMPUTE=tl.float8e4nv if kind not in ("plain", "mxfp4") else tl.bfloat16, STAGES=3)
        built = build(grouped._grouped_kernel, types, constants, num_warps=4 if rows == 16 else 8, num_stages=3)
        assert re.search("wgmma.mma_async|mma.sync", built.asm["ptx"]), "no tensor cores"
print("all compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "all compiled"
