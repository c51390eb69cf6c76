"""The state space's kernels compile for Hopper and hold in registers what their loops work on, which needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.kits.sass import unwritten

SCRIPT = """
import os, re, subprocess, tempfile
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.kernels import _triton_ssd as ssd
from tests.kits.sass import unwritten

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
FLOATS = dict.fromkeys(("work", "faded", "time", "decay", "skip", "out", "state", "pairs", "sums"), "*fp32")
ROUND = ("heads", "dim", "size", "piece")
TYPES = dict(FLOATS, slots="*i64", query_starts="*i32")

def tool(name, *args):
    return subprocess.run([os.path.join(TOOLS, name), *args], capture_output=True, text=True, check=True).stdout

def build(kernel, types, constants, warps, most=None, *, stack=0, shared=227 * 1024):
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names)
                  if types[name].startswith("*") or name.endswith("stride") or name in ROUND}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps, maxnreg=most))
    assert built.metadata.shared <= shared, (kernel.__name__, built.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        used, sass = tool("cuobjdump", "-res-usage", file.name), tool("nvdisasm", file.name)
    assert int(re.search(r"STACK:(\\d+)", used)[1]) <= stack, f"{kernel.__name__} spills registers: {used}"
    assert not unwritten(sass), (kernel.__name__, constants, unwritten(sass))

def build_all(name, how, values, state, *, stack=16):
    types = TYPES | dict.fromkeys(("x", "b", "c"), f"*{name}")
    constants = dict(GROUP=12, BLOCK=32, STATE=state, VALUES=values, CHUNK=how.chunk, WHOLE=True, TERMS=how.terms,
                     OUT_TERMS=how.out_terms, PRECISION=how.precision, STAGES=how.stages,
                     COMPUTE=tl.bfloat16 if how.terms else tl.float32)
    of_pieces, of_outputs = how.registers or (None, None)
    build(ssd._chunk_kernel, types, constants, how.warps)
    # As many programs share a multiprocessor's shared memory as its registers. Triton 3.9 keeps some on the stack.
    build(ssd._piece_kernel, types, constants, how.warps, of_pieces, stack=16,
          shared=56 * 1024 if of_pieces else 113 * 1024)
    build(ssd._scan_kernel, types, constants, how.warps, of_outputs, stack=stack,
          shared=75 * 1024 if of_outputs else 227 * 1024)

build_all("bf16", ssd.HALVES, 64, 128, stack=96)
build_all("bf16", ssd.HALVES, 32, 64)
build_all("bf16", ssd.LARGE_HALVES, 64, 256, stack=192)
build_all("fp16", ssd.TILINGS[torch.float16], 32, 128)
build_all("fp32", ssd.TILINGS[torch.float32], 16, 128)
step = dict(GROUP=12, STATE=128, VALUES=ssd.STEP_VALUES)
build(ssd._step_kernel, TYPES | dict.fromkeys(("x", "b", "c"), "*bf16"), step, 4)
build(ssd._chain_kernel, TYPES, dict(BLOCK=ssd.CHAIN_BLOCK), 4)
print("all compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_state_space_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all compiled" in done.stdout


def test_registers_that_nothing_wrote_are_found() -> None:
    right = [
        "        /*0010*/                   UMOV UR4, 0x10 ;",
        "        /*0020*/                   UIADD3.64 UR8, UR4, 0x2, URZ ;",
        "        /*0030*/              @!P1 HGMMA.64x32x16.F32.BF16 R56, R36, gdesc[UR8].tnspB, R56 ;",
    ]
    assert unwritten("\n".join([right[0], "        /*0018*/                   UMOV UR5, 0x1 ;", right[1]])) == []
    assert unwritten("\n".join(right)) == [line.strip() for line in right[1:]]
    both = ["        /*0010*/                   ULDC.128 UR8, c[0x0][0x20] ;", right[2].replace("R36, gdesc", "gdesc")]
    assert unwritten("\n".join(both)) == []
    assert len(unwritten("\n".join([both[0].replace(".128", ".64"), both[1]]))) == 1
    assert len(unwritten("        /*2da0*/                   UIADD3 UR14, UP0, UR14, 0x40, URZ ;")) == 1
