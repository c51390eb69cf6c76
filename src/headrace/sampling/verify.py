"""Which drafted tokens stand, for chains: exact match with what the target model samples itself."""

from __future__ import annotations

import torch
from torch import Tensor


def verify(tokens: Tensor, drafts: Tensor, num_drafts: Tensor, *, done: Tensor | None = None) -> Tensor:
    """Tokens accepted per row, 1 .. k + 1: the drafts that equal the target's own tokens, up to the first that
    doesn't, and the target's token after them. What is accepted is `tokens[row, :num_accepted]`.

    With counter-based noise the target draws the same token with and without drafts, so the output is the same
    too (exact-match acceptance; Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
    2023, for the scheme).

    Args:
        tokens: int64 [rows, k + 1], sampled by the target at each position, given the drafts before it.
        drafts: int64 [rows, k].
        num_drafts: int64 [rows], 0 .. k; the rest of a row of `drafts` is padding.
        done: bool [rows, k + 1], whether the sequence ends with the token; nothing is accepted after it.
    """
    positions = torch.arange(drafts.shape[1], device=drafts.device)
    goes_on = (tokens[:, :-1] == drafts) & (positions < num_drafts[:, None])
    if done is not None:
        goes_on &= ~done[:, :-1]
    return 1 + goes_on.long().cumprod(1).sum(1)
