"""The same sampler on a GPU: the noise bit for bit, and every feature against the CPU."""

from __future__ import annotations

import copy
import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from headrace.sampling.noise import Purpose, uniform
from headrace.types import Sampling
from tests.sampling.driver import new_sampler, step
from tests.sampling.twin import Sequence

pytestmark = pytest.mark.gpu

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=50.0, top_p=0.99),
    Sampling(temperature=1.0, top_k=40),
    Sampling(temperature=9.0, top_k=2000, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.02),
    Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(temperature=1.0, frequency_penalty=1.0, no_repeat_ngram_size=2, bad_words=((5,), (1, 2))),
    Sampling(logit_bias={3: 9.0, 8: -100.0}),
]


def test_noise_has_the_same_bits() -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (4096,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(4096)
    for purpose in Purpose:
        expected = uniform(seeds, positions, purpose)
        assert torch.equal(uniform(seeds.cuda(), positions.cuda(), purpose).cpu(), expected)


def test_tokens_and_logprobs_equal_the_cpus() -> None:
    vocab = 4000
    generator = torch.Generator().manual_seed(2)
    seqs = [
        Sequence(msgspec.structs.replace(sampling, seed=7 * i, logprobs=3, processed_logprobs=i % 3 == 0), [1, 2, 3])
        for i, sampling in enumerate(SAMPLINGS)
    ]
    seqs += [dataclasses.replace(copy.deepcopy(seq), min_tokens=3, stop_ids=tuple(range(50))) for seq in seqs]
    here, there = copy.deepcopy(seqs), copy.deepcopy(seqs)
    on_cpu = new_sampler(here, vocab=vocab, num_valid=3990)
    on_gpu = new_sampler(there, vocab=vocab, num_valid=3990, device="cuda")
    slots = list(range(len(seqs)))
    for _ in range(6):
        logits = torch.randn(len(seqs), vocab, generator=generator) * 2
        one, two = step(on_cpu, here, logits, slots), step(on_gpu, there, logits, slots)
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.done.tolist() == two.done.tolist()
        assert one.logprobs.keys() == two.logprobs.keys()
        for row, found in one.logprobs.items():
            assert np.array_equal(found.ids, two.logprobs[row].ids)
            assert np.array_equal(found.ranks, two.logprobs[row].ranks)
            np.testing.assert_allclose(found.values, two.logprobs[row].values, atol=1e-4)
