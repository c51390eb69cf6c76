"""The delta rule's kernels compile for Hopper and hold in registers what their loops work on, which needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, re, subprocess, tempfile
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.kernels import _triton_delta as delta
from headrace.kernels._triton_delta_chunks import chunk_kernel, feature_chunk_kernel

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
TYPES = dict.fromkeys(("decay", "beta", "factors", "faded", "peaks", "state", "out"), "*fp32")
TYPES |= dict(scale="fp32", slots="*i64", query_starts="*i32")
ROUND = ("heads", "k_dim", "v_dim")

def build(kernel, types, constants, options):
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names)
                  if types[name].startswith("*") or name.endswith("stride") or name in ROUND}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= 227 * 1024, (kernel.__name__, built.metadata.shared)
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = os.path.join(folder, "kernel.cubin"), os.path.join(folder, "kernel.ptx")
        open(cubin, "wb").write(built.asm["cubin"])
        open(ptx, "w").write(built.asm["ptx"])
        used = subprocess.run([os.path.join(TOOLS, "cuobjdump"), "-res-usage", cubin], capture_output=True, text=True)
        again = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", ptx, "-o", cubin]
        said = subprocess.run(again, capture_output=True, text=True, check=True).stderr
    assert int(re.search(r"STACK:(\\d+)", used.stdout)[1]) == 0, f"{kernel.__name__} spills registers: {used.stdout}"
    assert "serialized" not in said, f"{kernel.__name__}: {said}"

for name, exact in (("bf16", tl.bfloat16), ("fp16", tl.float16), ("fp32", tl.float32)):
    dtype = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32)[name]
    for by_feature in (False, True):
        cut = delta.tiling(torch.empty(0, dtype=dtype), by_feature=by_feature)
        constants = dict(
            GROUP=1 if by_feature else 4, KEYS=128, SPAN=128, SLICE=cut.features, PART=cut.part, CHUNK=2 * cut.part,
            LEVELS=cut.part.bit_length() - 1, IS_HALF=cut.is_half, COMPUTE=tl.float16 if cut.is_half else tl.float32,
            WIDE=tl.bfloat16 if by_feature and cut.is_half else exact, BY_FEATURE=by_feature, VALUES=cut.values,
            STAGES=cut.stages,
        )
        types = TYPES | dict.fromkeys("qkv", f"*{name}")
        types |= dict.fromkeys(("solved", "read", "keep"), "*fp16" if cut.is_half else "*fp32")
        kernel = feature_chunk_kernel if by_feature else chunk_kernel
        build(kernel, types, constants, dict(num_warps=cut.part_warps, num_stages=cut.part_stages))
        build(delta._chain_kernel, types, constants, dict(num_warps=cut.chain_warps))
        constants["VALUES"] = delta.STEP_VALUES
        build(delta._delta_step_kernel, types, constants, dict(num_warps=4))
print("all compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_delta_rule_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all compiled" in done.stdout
