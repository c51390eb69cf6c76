"""The gated delta rule (Yang et al. 2025) over packed rows that go on from states.

A head's state S [k_dim, v_dim] decays, forgets what it holds for a key, and takes the key's new value:
S <- S' + beta * k (v - k^T S')^T with S' = exp(decay) * S; the output is q^T S. The decay is one number a head (Gated
DeltaNet) or one a key feature (Kimi Delta Attention, Kimi Team 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.port import StateRows

__all__ = ["delta_rule"]

CHUNK, CHUNK_BY_FEATURE = 64, 16
"""Tokens that are solved together: pairs of them take memory, by feature where the decay is."""
NORM_EPS = 1e-6


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, beta: Tensor, state: Tensor, step: StateRows
) -> Tensor:
    """Scan the rows' tokens; a row of one token is a single update. Queries and keys are normed to length one.

    Args:
        q, k: [tokens, k_heads, k_dim]; each serves heads / k_heads value heads in a row.
        v: [tokens, heads, v_dim].
        decay: [tokens, heads, 1 or k_dim] float32, logarithms, at most 0.
        beta: [tokens, heads], 0 to 1.
        state: [slots, heads, k_dim, v_dim]; the rows' slots are overwritten.

    Returns:
        [tokens, heads, v_dim] float32.
    """
    if not v.is_cuda:
        return delta_rule_twin(q, k, v, decay=decay, beta=beta, state=state, step=step)
    from headrace.kernels import _fla
    from headrace.kernels._triton_delta import launch_delta_rule

    if _fla.takes(q, v, decay, step):
        return _fla.fla_delta_rule(q, k, v, decay=decay, beta=beta, state=state, step=step)
    return launch_delta_rule(q, k, v, decay=decay, beta=beta, state=state, step=step)


def delta_rule_twin(
    q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, beta: Tensor, state: Tensor, step: StateRows
) -> Tensor:
    """The plain torch form of `delta_rule`."""
    group = v.shape[1] // q.shape[1]
    q = (_unit(q) * q.shape[-1] ** -0.5).repeat_interleave(group, 1)
    k = _unit(k).repeat_interleave(group, 1)
    v, beta = v.float(), beta.float()
    out = torch.empty_like(v)
    starts = step.context_starts
    size = CHUNK if decay.shape[-1] == 1 else CHUNK_BY_FEATURE
    for row in range(step.num_context_rows):
        slot = step.slots[row]
        live = state[slot].float()
        for begin in range(starts[row], starts[row + 1], size):
            part = slice(begin, min(begin + size, starts[row + 1]))
            out[part], live = _chunk(q[part], k[part], v[part], decay[part], beta[part], live)
        state[slot] = live.to(state.dtype)
    if starts[-1] < len(v):
        slots = step.slots[step.num_context_rows :]
        rest = slice(starts[-1], len(v))
        out[rest], live = _update(q[rest], k[rest], v[rest], decay[rest], beta[rest], state[slots].float())
        state[slots] = live.to(state.dtype)
    return out


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _update(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row. state: [rows, heads, k_dim, v_dim] -> (out [rows, heads, v_dim], the new states)"""
    state = state * decay.exp()[..., None]
    delta = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return torch.einsum("rhkv,rhk->rhv", state, q), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens of one row at once. state: [heads, k_dim, v_dim] -> (out [tokens, heads, v_dim], the new state)

    What each token writes solves a triangular system: it is the token's own value less what the state and the tokens
    before it in the chunk hold for its key, all decayed to its position.
    """
    q, k, v, total = (x.transpose(0, 1) for x in (q, k, v, decay.cumsum(0)))  # [heads, tokens, dim]
    beta = beta.T[..., None]
    count = q.shape[1]
    ahead = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(ahead[..., None], float("-inf")).exp()  # i from j
    pairs = _pairs(k, k, between) * beta
    written = beta * (v - (k * total.exp()) @ state)
    written = torch.linalg.solve_triangular(pairs, written, upper=False, unitriangular=True)
    out = (q * total.exp()) @ state + _pairs(q, k, between) @ written
    last = total[:, -1:]
    state = state * last.exp().transpose(1, 2) + (k * (last - total).exp()).transpose(1, 2) @ written
    return out.transpose(0, 1), state


def _pairs(a: Tensor, b: Tensor, between: Tensor) -> Tensor:
    """[heads, i, j] products of a_i and b_j, each feature decayed from j to i"""
    if between.shape[-1] == 1:
        return (a @ b.transpose(1, 2)) * between[..., 0]
    return torch.einsum("hid,hjd,hijd->hij", a, b, between)
