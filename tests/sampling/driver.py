"""Short ways to set a sampler up and to run it."""

from __future__ import annotations

import torch

from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling.state import RowParams, SlotParams
from headrace.seam import Ints, SlotInit
from headrace.types import Sampling
from tests.sampling.twin import Sequence


def params_of(samplings: list[Sampling], vocab_size: int) -> RowParams:
    """Row i has the parameters `samplings[i]`."""
    state = SlotParams(len(samplings), vocab_size, device=torch.device("cpu"))
    for slot, sampling in enumerate(samplings):
        state.begin(SlotInit(slot, slot, sampling, 0, 0, 10, ()))
    return state.rows(torch.arange(len(samplings)))


def new_sampler(
    seqs: list[Sequence],
    *,
    vocab: int,
    num_valid: int | None = None,
    device: str = "cpu",
    by_kernels: bool | None = None,
) -> Sampler:
    """Sequence i in slot i."""
    sampler = Sampler(len(seqs), vocab, num_valid_ids=num_valid or vocab, device=device, by_kernels=by_kernels)
    for slot, seq in enumerate(seqs):
        sampler.begin(seq.init(slot))
    return sampler


def step(
    sampler: Sampler, seqs: list[Sequence], logits: torch.Tensor, slots: list[int], *, row_flags: Ints | None = None
) -> Sampled:
    """One token for each of `slots`, rows in that order; `seqs` are by slot and grow. `logits` is left as it is."""
    lengths = torch.tensor([len(seqs[slot].tokens) for slot in slots], device=sampler.device)
    index = torch.tensor(slots, device=sampler.device)
    sampled = sampler.sample(logits.to(sampler.device, copy=True), index, lengths, row_flags)
    for row, slot in enumerate(slots):
        seqs[slot].output.append(int(sampled.tokens[row]))
    return sampled
