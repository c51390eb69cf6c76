"""RMS norm (+ the residual add before it), its result in the form that the next product takes."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.quantise import Form, Quantised, quantise, quantise_twin
from headrace.kernels.rms_norm import rms_norm, rms_norm_twin

__all__ = ["norm_quantise"]


def norm_quantise(
    x: Tensor, weight: Tensor, eps: float, *, form: Form, residual: Tensor | None = None, plus_one: bool = False
) -> tuple[Quantised, Tensor | None]:
    """`rms_norm`, then `quantise` of what it gives in x's dtype; one kernel on a GPU.

    Returns:
        the normalised rows in the form asked for, and x + residual where there is a residual.
    """
    if x.is_cuda:
        from headrace.kernels._triton_rows import launch_norm

        return launch_norm(x, weight, eps, form=form, residual=residual, plus_one=plus_one)
    normed = rms_norm(x, weight, eps, residual=residual, plus_one=plus_one)
    if isinstance(normed, Tensor):
        return quantise(normed, form), None
    return quantise(normed[0], form), normed[1]


def norm_quantise_twin(
    x: Tensor, weight: Tensor, eps: float, *, form: Form, residual: Tensor | None = None, plus_one: bool = False
) -> tuple[Quantised, Tensor | None]:
    """The plain torch form of `norm_quantise`."""
    normed = rms_norm_twin(x, weight, eps, residual=residual, plus_one=plus_one)
    if isinstance(normed, Tensor):
        return quantise_twin(normed, form), None
    return quantise_twin(normed[0], form), normed[1]
