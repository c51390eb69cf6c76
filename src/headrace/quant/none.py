"""No quantisation: the checkpoint's own dense weight.

On a CPU the weight is packed for the compiled product, in bfloat16 or float32, and the original can be freed. That
product needs no bfloat16 instructions to be fast (it widens in registers, and reads half the memory) and uses them
where the processor has them. Its rows have the same bits in any batch, which torch's own float32 product does not
promise, so there is nothing to choose by the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._native import processor_features
from headrace.kernels.moe.port import Stacked
from headrace.kernels.packed_linear import Packed, can_pack, pack, packed_linear, packed_rows
from headrace.quant._plain import FromPlain
from headrace.quant.port import ActLike, PreparedWeight

__all__ = ["Dense"]

Product = Literal["packed_float32", "packed_bfloat16", "torch", "torch_float32"]

_BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight as one of the products takes it, and the dtype it came in."""

    product: Product
    weight: Tensor | Packed  # [out, in]
    bias: Tensor | None  # [out]; float32 for a packed weight
    dtype: torch.dtype
    out_features: int
    in_features: int

    @property
    def size_bytes(self) -> int:
        weight = self.weight.data if isinstance(self.weight, Packed) else self.weight
        return weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def choose_product(dtype: torch.dtype, *, device_type: str, packs: bool, features: frozenset[str]) -> Product:
    """Which product a dense weight gets, and so how it is held.

    Args:
        packs: whether the compiled product is there.
        features: instruction sets of the processor.
    """
    if device_type != "cpu":
        return "torch"
    if packs:
        return "packed_bfloat16" if dtype == torch.bfloat16 else "packed_float32"
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not features & _BFLOAT16_FEATURES):
        return "torch_float32"
    return "torch"


class Dense(FromPlain):
    """A weight in its own precision; sums are float32."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """weight: [out, in]; bias: [out]."""
        product = choose_product(
            weight.dtype, device_type=weight.device.type, packs=can_pack(), features=processor_features()
        )
        if product != "torch" and bias is not None:
            bias = bias.float()
        held: Tensor | Packed = weight
        if product == "packed_bfloat16":
            held = pack(weight, torch.bfloat16)
        elif product == "packed_float32":
            held = pack(weight, torch.float32)
        elif product == "torch_float32":
            held = weight.float()
        return DenseWeight(product, held, bias, weight.dtype, *weight.shape)

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """weight [experts, out, in]."""
        return Stacked("plain", tensors["weight"], bias=bias)

    def linear(self, act: ActLike, prepared: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, in] -> [tokens, out]"""
        assert isinstance(prepared, DenseWeight)
        x, held = act.data, prepared.weight
        if isinstance(held, Packed):
            return packed_linear(x, held, prepared.bias, out_dtype=out_dtype)
        return F.linear(x.to(held.dtype), held, prepared.bias).to(out_dtype or x.dtype)

    def rows(self, prepared: PreparedWeight, ids: Tensor) -> Tensor:
        """ids [n] int64 -> [n, in] in the dtype that `prepare` was given"""
        assert isinstance(prepared, DenseWeight)
        held = prepared.weight
        rows = packed_rows(held, ids) if isinstance(held, Packed) else F.embedding(ids, held)
        return rows.to(prepared.dtype)
