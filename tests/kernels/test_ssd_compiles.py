"""The state space's kernels compile for Hopper and hold in registers what their loops work on, which needs no GPU."""

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
from headrace.kernels import _triton_ssd as ssd

TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
FLOATS = dict.fromkeys(("work", "faded", "time", "decay", "skip", "out", "state"), "*fp32")
ROUND = ("heads", "dim", "size", "piece")
TYPES = dict(FLOATS, slots="*i64", query_starts="*i32")

def build(kernel, types, constants, options, *, stack=0, shared=227 * 1024):
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names)
                  if types[name].startswith("*") or name.endswith("stride") or name in ROUND}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= shared, (kernel.__name__, built.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        used = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"STACK:(\\d+)", used)[1]) <= stack, f"{kernel.__name__} spills registers: {used}"

for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
    how = ssd.HALVES if name == "bf16" else ssd.TILINGS[dtype]
    types = TYPES | dict.fromkeys(("x", "b", "c"), f"*{name}")
    constants = dict(GROUP=12, STATE=128, VALUES=min(64, how.max_tile // 128), CHUNK=how.chunk, TERMS=how.terms,
                     HELD_TERMS=how.held_terms, PRECISION=how.precision, STAGES=how.stages,
                     COMPUTE=tl.bfloat16 if how.terms else tl.float32)
    options = dict(num_warps=how.warps)
    # What bfloat16 keeps on the stack (24 to 152 bytes by Triton's release) is used before and behind the loop, nearly
    # all of it. Two programs share a multiprocessor.
    build(ssd._scan_kernel, types, constants, options, stack=192, shared=113 * 1024)
    if how.piece_registers:
        options["maxnreg"] = how.piece_registers
    build(ssd._piece_kernel, types, constants, options, stack=64, shared=56 * 1024)
    build(ssd._step_kernel, types, dict(GROUP=12, STATE=128, VALUES=ssd.STEP_VALUES), dict(num_warps=4))
build(ssd._chain_kernel, TYPES, dict(BLOCK=ssd.CHAIN_BLOCK), dict(num_warps=4))
print("all compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_state_space_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all compiled" in done.stdout
