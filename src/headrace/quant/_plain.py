"""What recipes share that make their weight of a plain one and take activations as they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.quantise import PLAIN, Form
from headrace.quant.port import PreparedWeight, Stored


class FromPlain(ABC):
    """A checkpoint holds nothing but `weight`."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The plain weight."""
        return (Stored("weight", dtype),)

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """`prepare` of the plain weight."""
        return self.prepare(tensors["weight"], bias)

    @abstractmethod
    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """weight: [out, in]; bias: [out]."""

    def wanted(self, prepared: PreparedWeight) -> Form:
        """As they are."""
        return PLAIN
