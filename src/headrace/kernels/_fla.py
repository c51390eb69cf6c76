"""The delta rule's prompts on flash-linear-attention's kernels (Yang and Zhang 2024), where fla-core is installed.

Ours are Triton kernels too (`_triton_delta.py`). Theirs round queries and keys once more, normed, and what a chunk
writes and yields, to the model's 16 bits; states stay in float32. Chunks are found from lengths on the host, so rows
of steps that are captured as CUDA graphs never go there; generated tokens don't either.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace import env
from headrace.kernels.port import StateRows

log = logging.getLogger("headrace.engine")

HALVES = (torch.bfloat16, torch.float16)
MAX_KEY_DIM = 256
INSTALL = "pip install 'headrace[fla]'"


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of layer on one kind of GPU."""

    capability: tuple[int, int]
    """Of the GPU, as CUDA numbers it."""
    by_feature: bool
    """Whether a key feature has a decay of its own (Kimi Delta Attention), or a head (Gated DeltaNet)."""
    key_dim: int
    min_tokens: int
    """Prompt tokens of a step from which on these kernels were the faster ones."""


RULES: tuple[Rule, ...] = ()
"""As `benchmarks/gpu_kernels.py --only fla` measures them. Empty: on an H200 ours took 11 to 36% of fla-core 0.6.0's
time (docs/performance.md), so prompts go there only where HEADRACE_FLA is `always`."""


class _Singles(NamedTuple):
    """The rows of one token each, as a step of their own."""

    slots: Tensor
    query_starts: Tensor
    num_context_rows: int = 0
    context_starts: tuple[int, ...] = (0,)


def takes(q: Tensor, v: Tensor, decay: Tensor, step: StateRows, *, rules: Sequence[Rule] | None = None) -> bool:
    """Whether a step's prompts go to these kernels. Shapes as of `delta_rule`.

    Raises:
        ValueError: HEADRACE_FLA is `always`, and they aren't installed; or it is no word that it may be.
    """
    if not step.num_context_rows or (wanted := env.fla()) == "never":
        return False
    if q.dtype not in HALVES or v.dtype != q.dtype or q.shape[2] > MAX_KEY_DIM:
        return False
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if wanted == "always":
        package()
        return True
    rules = RULES if rules is None else rules
    if not rules or not _is_usable():
        return False
    kind = (torch.cuda.get_device_capability(q.device), decay.shape[2] > 1, q.shape[2])
    return any(
        (rule.capability, rule.by_feature, rule.key_dim) == kind and step.context_starts[-1] >= rule.min_tokens
        for rule in rules
    )


def check() -> None:
    """Before the first step of a model with recurrent layers.

    Raises:
        ValueError: as `takes`.
    """
    if env.fla() == "always":
        package()


def package() -> tuple[Any, Any]:
    """-> (the scan with one decay a head, the one with one a key feature)

    Raises:
        ValueError: it isn't installed, or can't be imported.
    """
    try:
        return (
            import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule,
            import_module("fla.ops.kda").chunk_kda,
        )
    except Exception as error:  # its import asks Triton for a driver
        raise ValueError(
            f"HEADRACE_FLA: flash-linear-attention can't be imported ({type(error).__name__}: {error}):"
            f" {INSTALL}, or set it to auto"
        ) from error


@cache
def _is_usable() -> bool:
    if find_spec("fla") is None:
        return False
    try:
        package()
    except ValueError as error:
        log.info("prompts of recurrent layers stay with our kernels: %s", error)
        return False
    return True


def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, beta: Tensor, state: Tensor, step: StateRows
) -> Tensor:
    """As `delta_rule`; rows of one token are our kernel's."""
    num_rows, num_tokens = step.num_context_rows, step.context_starts[-1]
    if num_rows < len(step.slots):
        from headrace.kernels._triton_delta import launch_delta_rule

        singles = _Singles(step.slots[num_rows:], step.query_starts[num_rows:])
        out = launch_delta_rule(q, k, v, decay=decay, beta=beta, state=state, step=singles)
    else:
        out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    by_head, by_feature = package()
    is_by_head = decay.shape[2] == 1
    scan = by_head if is_by_head else by_feature
    # It keeps what it derives from lengths as long as it is handed the same two objects.
    starts, starts_on_host = _starts(step.context_starts, v.device)
    slots = step.slots[:num_rows]
    written, states = scan(
        q[None, :num_tokens],
        k[None, :num_tokens],
        v[None, :num_tokens],
        g=(decay[..., 0] if is_by_head else decay)[None, :num_tokens],
        beta=beta[None, :num_tokens],
        initial_state=state[slots].float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=starts,
        cu_seqlens_cpu=starts_on_host,
    )
    out[:num_tokens] = written[0]
    state[slots] = states.to(state.dtype)
    return out


@lru_cache(maxsize=4)
def _starts(context_starts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """[rows + 1] int64, (on the device, on the host)"""
    on_host = torch.tensor(context_starts)
    return on_host.to(device), on_host
