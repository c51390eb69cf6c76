"""Triton kernels on a CPU: the devices that kernel tests run on, and what its interpreter needs to round as a GPU does.

`tests/conftest.py` asks for the interpreter where there is no GPU, before any kernel is defined. Of the releases in use
(3.6 to 3.9) it cuts instead of rounding, loses the carry of a rounded FP8 mantissa, multiplies the bit patterns of
bfloat16, and older ones fail on loop bounds with newer releases of numpy.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

HAS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not HAS_INTERPRETER, reason="needs Triton and its interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

_FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def _convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
    """[...] bit patterns -> bit patterns, to nearest, as torch converts."""
    bits = torch.from_numpy(np.ascontiguousarray(value)).view(_FLOATS[source.name])
    out = bits.to(_FLOATS[target.name]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
    return out.numpy().view(f"uint{target.primitive_bitwidth}").reshape(value.shape)


@pytest.fixture
def ordered_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter that sum in one order, as tensor cores do; a BLAS's order depends on the place."""
    if not HAS_INTERPRETER:
        return
    from triton.runtime import interpreter

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        return np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype), optimize=False)

    class Ordered:
        def __getattr__(self, name: str) -> Any:
            return matmul if name == "matmul" else getattr(np, name)

    monkeypatch.setattr(interpreter, "np", Ordered())


def _repair() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if "scope" in patch.__code__.co_varnames:
        interpreter._patch_lang_tensor = patch_with_index
    interpreter._convert_float = _convert


if HAS_INTERPRETER:
    _repair()
