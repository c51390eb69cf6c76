"""Attention over heads of 512 features, and of latents, compiles for Hopper and holds what it works on, which
needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, re, subprocess, sys, tempfile
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.kernels import _triton_compressed as compressed, _triton_decode as decode, _triton_prefill as prefill
from headrace.kernels import _triton_latent as latent, _triton_latent_parts as parts, _triton_unfolded as unfolded
from headrace.kernels.quantise import FP8

TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
COMMON = dict(tables="*i32", kv_lens="*i32", query_starts="*i32", sinks="*bf16", out_scale="*fp32", scale="fp32",
              cap="fp32", v_scale="fp32", partial="*fp32", arrived="*i32")
OFF = ("HAS_WINDOW", "IS_CHUNKED", "HAS_SINK_TOKENS", "HAS_CAP", "HAS_SINKS", "IS_FP8_OUT", "IS_FIXED", "CHAINED")

# PyTorch 2.11 to 2.13 bring Triton 3.6 and 3.7, which spill nothing; 3.9 does some of the absorbed latents' registers.
STACK = 0 if triton.__version__ < "3.8" else 320

def build(kernel, types, constants, warps, as_source=ASTSource):
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names)
                  if types[name].startswith("*") or (name.endswith("stride") and "table_stride" not in name)}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = as_source(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
    assert built.metadata.shared <= 227 * 1024, built.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        used = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    assert int(re.search("STACK:([0-9]+)", used)[1]) <= STACK, f"registers are spilled: {used}"

for q_type, kv_type, dtype, kv_dtype, compute in (
    ("*bf16", "*bf16", torch.bfloat16, torch.bfloat16, tl.bfloat16),
    ("*bf16", "*fp8e4nv", torch.bfloat16, FP8, tl.float16),
    ("*fp32", "*fp32", torch.float32, torch.float32, tl.float32),
):
    types = COMMON | dict(q=q_type, k_cache=kv_type, v_cache=kv_type, out=q_type)
    shared = dict.fromkeys(OFF, False) | dict(GROUP=8, DIM=512, DIM_BLOCK=512, BLOCK_SIZE=32, COMPUTE=compute)
    rows, tile, warps, stages = prefill.tuned(512, dtype, is_fp8=kv_dtype == FP8, max_query=2048, group=8)
    build(prefill._prefill_kernel, types, shared | dict(ROWS=rows, TILE=tile, STAGES=stages), warps)
    tile, warps, stages = decode.tuned(512, kv_dtype, num_programs=1024)
    build(decode._decode_kernel, types, shared | dict(
        GROUP_BLOCK=8, TILE=tile, IS_SPLIT=True, MAX_PARTS=64, UNROLLED=8, STAGES=stages), warps)
    types |= dict(keys=kv_type, entries=kv_type, chosen="*i64", sinks="*fp32", rows="*i64", positions="*i64",
                  key_tables="*i32", entry_tables="*i32")
    build(compressed._compressed_kernel, types, dict(
        NUM_HEADS=64, HEADS=compressed.HEADS, DIM=512, DIM_BLOCK=512, BLOCK_SIZE=32, EVERY=4, WINDOW=128,
        HAS_ENTRIES=True, IS_CHOSEN=True, HAS_SINKS=True, TILE=compressed.MAX_TILE_ELEMENTS // 512, COMPUTE=compute), 8)

for name, dtype, compute in (("bf16", torch.bfloat16, tl.bfloat16), ("fp32", torch.float32, tl.float32)):
    tuning = unfolded.tuned(dtype)
    types = dict.fromkeys(("q", "keys", "turned", "values", "out"), f"*{name}")
    types |= dict(carry="*fp32", tiles="*i32", scale="fp32")
    for has_carry in (False, True):
        build(unfolded._unfolded_kernel, types, unfolded._unfolded_sizes(128, 64, 128) | dict(
            TOKENS=tuning.tokens, TILE=tuning.tile, STAGES=tuning.stages, COMPUTE=compute,
            HAS_CARRY=has_carry), tuning.warps)

rank = dict(NUM_HEADS=128, RANK=512, RANK_BLOCK=512, PART=512 + parts.PART_ENDS, MAX_PARTS=64, MIN_PART=128)
off = dict.fromkeys(OFF, False)
for kv_type, compute in (("*bf16", tl.bfloat16), ("*fp8e4nv", tl.float16)):
    types = dict.fromkeys(("q", "turned_q", "out"), "*bf16") | dict(
        cache=kv_type, chosen="*i64", tables="*i32", kv_lens="*i32", query_starts="*i32", partial="*fp32", parts="*i32",
        scale="fp32", v_scale="fp32")
    for reads, rows in (("all", 256), ("all", 0), ("window", 256), ("chosen", 256), ("chosen", 0)):
        pairs, tile, warps, stages = latent.tuned(128, 512, torch.bfloat16, reads)
        if kv_type != "*bf16":
            STACK = 400  # it is converted in registers
        build(latent._latent_kernel, types, off | rank | latent._attend_sizes(128, 128, 512, 64) | dict(
            HEADS=pairs, TOKENS=1, TOP=2048 if reads == "chosen" else 0, BLOCK_SIZE=32, TILE=tile, ROWS=rows,
            HAS_WINDOW=reads == "window", COMPUTE=compute, STAGES=stages, SHARES_OUT=True), warps)
build(parts._merge_kernel, types, rank | dict(AT_ONCE=16, CHAINED=False), 4)
print("all compiled")
"""

HOPPER = (
    SCRIPT[: SCRIPT.index("for q_type")]
    + """
try:
    from triton.experimental.gluon._runtime import GluonASTSource
    from headrace.kernels import _gluon_latent as gluon, _triton_latent_parts as parts
except (ImportError, AttributeError) as error:
    print("not here:", error)
    sys.exit()
types = dict.fromkeys(("q", "turned_q", "cache", "out"), "*bf16") | dict(
    tables="*i32", kv_lens="*i32", query_starts="*i32", partial="*fp32", parts="*i32", scale="fp32")
for rows in (256, 0):
    build(gluon._latent_rows_kernel, types, dict(
        NUM_HEADS=128, NOPE=128, RANK=512, ROPE=64, BLOCK_SIZE=32, HEADS=gluon.HEADS, TILE=gluon.TILE, ROWS=rows,
        MIN_PART=128, MAX_PARTS=64, PART=512 + parts.PART_ENDS, CHAINED=False), gluon.WARPS, GluonASTSource)
print("all compiled")
"""
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("script", [SCRIPT, HOPPER], ids=["Triton", "Gluon"])
def test_attention_compiles_for_hopper(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    if done.stdout.startswith("not here"):
        pytest.skip(f"this Triton's Gluon can't build it: {done.stdout}")
    assert done.stdout.strip() == "all compiled"
