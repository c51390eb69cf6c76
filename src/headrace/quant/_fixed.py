"""Any recipe's weights, multiplied so that a row of a step has the same bits beside any others (`deterministic`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.fixed_linear import fixed_linear
from headrace.kernels.moe.port import Stacked
from headrace.kernels.packed_linear import Packed
from headrace.kernels.quantise import FP8, Form, Quantised, quantise
from headrace.quant._fp8 import Fp8Weight
from headrace.quant.none import DenseWeight
from headrace.quant.port import ActLike, ExpertsRecipe, PreparedWeight, Recipe, Stored


class Fixed:
    """Everything but the product is the recipe's own. On a CPU so is the product, which has to be the packed one."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The recipe's."""
        return self.recipe.stored(dtype)

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """
        Raises:
            ValueError: a weight without such a product.
        """
        return _checked(self.recipe.load(tensors, bias, widths=widths, dtype=dtype))

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """
        Raises:
            ValueError: a weight without such a product.
        """
        return _checked(self.recipe.prepare(weight, bias))

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """The recipe's: experts are multiplied by their backend."""
        assert isinstance(self.recipe, ExpertsRecipe)
        return self.recipe.stack(tensors, bias, widths=widths, dtype=dtype)

    def wanted(self, prepared: PreparedWeight) -> Form:
        """The recipe's."""
        return self.recipe.wanted(prepared)

    def linear(self, act: ActLike, prepared: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, in] -> [tokens, out]"""
        if isinstance(prepared, Fp8Weight):
            quantised = Quantised(act.data, act.scales) if act.data.dtype == FP8 else quantise(act.data, prepared.form)
            out_dtype = out_dtype or prepared.dtype
            return fixed_linear(quantised, prepared.weight, prepared.scales, prepared.bias, out_dtype=out_dtype)
        assert isinstance(prepared, DenseWeight)
        if isinstance(prepared.weight, Packed):
            return self.recipe.linear(act, prepared, out_dtype=out_dtype)
        plain = Quantised(act.data.to(prepared.weight.dtype))
        return fixed_linear(plain, prepared.weight, None, prepared.bias, out_dtype=out_dtype or act.data.dtype)

    def rows(self, prepared: PreparedWeight, ids: Tensor) -> Tensor:
        """The recipe's."""
        return self.recipe.rows(prepared, ids)


def unfixed(recipe: Any) -> Any:
    """The recipe by which weights are stored, where this one is about their products."""
    return recipe.recipe if isinstance(recipe, Fixed) else recipe


def _checked(prepared: PreparedWeight) -> PreparedWeight:
    if isinstance(prepared, Fp8Weight) and prepared.weight.is_cuda:
        return prepared
    if isinstance(prepared, DenseWeight) and (isinstance(prepared.weight, Packed) or prepared.weight.is_cuda):
        return prepared
    raise ValueError(
        "deterministic: true needs a GPU, or a C compiler and weights in 16 or 32 bits on a CPU: other products may"
        " round a request's sums differently with other requests beside it"
    )
