"""The gated activation of an MLP, its result in the form that the next product takes."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.act_mul import Activation, act_mul, act_mul_twin
from headrace.kernels.quantise import Form, Quantised, quantise, quantise_twin

__all__ = ["act_mul_quantise"]


def act_mul_quantise(x: Tensor, kind: Activation, *, form: Form) -> Quantised:
    """`act_mul`, then `quantise` of what it gives in x's dtype; one kernel on a GPU. x: [tokens, 2 * features]"""
    if x.is_cuda:
        from headrace.kernels._triton_rows import launch_act_mul

        return launch_act_mul(x, kind, form=form)
    return quantise(act_mul(x, kind), form)


def act_mul_quantise_twin(x: Tensor, kind: Activation, *, form: Form) -> Quantised:
    """The plain torch form of `act_mul_quantise`."""
    return quantise_twin(act_mul_twin(x, kind), form)
