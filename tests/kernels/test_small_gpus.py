"""GPUs with 99 KiB of shared memory a program (RTX 4090, L40S): kernels compile for them within it, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.kernels import _triton_latent as latent, _triton_latent_parts as parts, _triton_linear as linear
from headrace.kernels import _triton_ssd as ssd, _triton_unfolded as unfolded

ROOM = 99 * 1024
OFF = ("HAS_WINDOW", "IS_CHUNKED", "HAS_SINK_TOKENS", "CHAINED", "HAS_BIAS")

def build(kernel, types, constants, warps):
    names = kernel.arg_names
    constants = {name: value for name, value in (dict.fromkeys(OFF, False) | constants).items() if name in names}
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names)
                  if types[name].startswith("*") or name in ("num_in", "num_out", "part")
                  or (name.endswith("stride") and "table" not in name and "scale" not in name)}
    source = ASTSource(fn=kernel, signature=types, attrs=attributes,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    built = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=dict(num_warps=warps))
    assert built.metadata.shared <= ROOM, (kernel.__name__, built.metadata.shared, constants)

def stream(tuned, by_block):
    for num_rows in (1, 16, 32, 64):
        for num_out in (2112, 4096, 7168, 36864):
            tuning = linear.with_room(tuned(num_rows, num_out, 7168), num_rows, ROOM)
            rows = max(linear.NARROW_SIDE // tuning.parts, linear.power_of_2(num_rows))
            build(linear._stream_kernel, dict(x="*fp8e4nv", weight="*fp8e4nv", out="*bf16", bias="*bf16",
                  x_scale="*fp32", w_scale="*fp32"), dict(
                  ROWS=rows, OUTPUTS=linear.WIDE_SIDE // tuning.parts, INPUTS=tuning.inputs, PARTS=tuning.parts,
                  BY_BLOCK=by_block, BY_ROW=True, BY_OUTPUT=True, STAGES=tuning.stages), tuning.warps)

stream(linear.tuned, False)
stream(linear.tuned_blocks, True)

how = unfolded.tuned(torch.bfloat16, room=ROOM)
types = dict.fromkeys(("q", "keys", "turned", "values", "out"), "*bf16") | dict(
    carry="*fp32", tiles="*i32", scale="fp32")
build(unfolded._unfolded_kernel, types, unfolded._unfolded_sizes(128, 64, 128) | dict(
    TOKENS=how.tokens, TILE=how.tile, STAGES=how.stages, COMPUTE=tl.bfloat16, HAS_CARRY=True), how.warps)

types = dict.fromkeys(("q", "turned_q", "out", "cache"), "*bf16") | dict(
    chosen="*i64", tables="*i32", kv_lens="*i32", query_starts="*i32", partial="*fp32", parts="*i32", scale="fp32",
    v_scale="fp32")
for num_heads in (16, 128):
    for reads, rows in (("all", 256), ("all", 0), ("chosen", 256)):
        pairs, tile, warps, stages = latent.tuned(num_heads, 512, torch.bfloat16, reads, room=ROOM)
        heads = min(pairs, num_heads)
        build(latent._latent_kernel, types, latent._attend_sizes(num_heads, 128, 512, 64) | dict(
            HEADS=heads, TOKENS=1 if rows else pairs // heads, TOP=2048 if reads == "chosen" else 0, BLOCK_SIZE=32,
            TILE=tile, ROWS=rows, COMPUTE=tl.bfloat16, STAGES=stages, SHARES_OUT=warps > 4, PART=512 + parts.PART_ENDS,
            MAX_PARTS=64, MIN_PART=128), warps)

how = ssd.tiling(torch.bfloat16, 256, room=ROOM)
types = dict.fromkeys(("out", "work", "sums", "pairs", "state", "time", "decay", "skip"), "*fp32")
types |= dict.fromkeys(("x", "b", "c"), "*bf16") | dict(query_starts="*i32", slots="*i64")
build(ssd._scan_kernel, types, dict(
    GROUP=12, BLOCK=32, STATE=256, VALUES=64, CHUNK=how.chunk, WHOLE=True, TERMS=how.terms, OUT_TERMS=how.out_terms,
    PRECISION=how.precision, STAGES=how.stages, COMPUTE=tl.bfloat16), how.warps)
print("all compiled")
"""


@pytest.mark.slow
def test_kernels_fit() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert "all compiled" in done.stdout, done.stdout + done.stderr
