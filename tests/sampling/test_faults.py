"""What one request gets wrong stays with its rows."""

from __future__ import annotations

import pytest
import torch

from headrace.sampling import processors
from headrace.sampling.sampler import Sampler
from headrace.types import Sampling
from tests.sampling.driver import new_sampler, step
from tests.sampling.twin import Sequence

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)


def _three(sampling: Sampling) -> tuple[Sampler, list[Sequence]]:
    seqs = [Sequence(Sampling(), [0]), Sequence(sampling, [0, 1]), Sequence(Sampling(presence_penalty=9.0), [0])]
    return new_sampler(seqs, vocab=4), seqs


@pytest.mark.parametrize(
    "sampling, message",
    [
        (Sampling(logit_bias={4: 1.0}), "logit_bias: id 4 is outside the vocabulary of 4"),
        (Sampling(logit_bias={-1: 1.0}), "logit_bias: id -1 is outside"),
        (Sampling(logit_bias={1: float("nan")}), "logit_bias: the bias of id 1 is not a number"),
        (Sampling(bad_words=((1, 9),)), "bad_words: id 9 is outside"),
        (Sampling(bad_words=((),)), "bad_words: an empty token sequence"),
        (Sampling(processors=10**9), "logit"),
    ],
    ids=repr,
)
def test_bad_parameters_fail_their_row_only(sampling: Sampling, message: str) -> None:
    sampler, seqs = _three(sampling)
    for expected in ([3, 3], [3, 2]):
        sampled = step(sampler, seqs, LOGITS, [0, 1, 2])
        assert sampled.errors.keys() == {1} and message in sampled.errors[1]
        assert sampled.tokens[[0, 2]].tolist() == expected
    sampler.free(1)
    seqs[1] = Sequence(Sampling(), [0])
    sampler.begin(seqs[1].init(1))
    assert step(sampler, seqs, LOGITS, [0, 1, 2]).errors == {}


def test_processors_see_history_and_fail_alone() -> None:
    seen: list[list[list[int]]] = []

    def count_down(req_id, logits, token_ids, stream_ptr, client_id):
        assert req_id == 1001 and logits.shape == (1, 1, 4)
        seen.append(token_ids)
        logits[..., 3 - len(seen)] = 100.0
        if len(seen) == 3:
            logits[:] = 0.0
            raise KeyError("lost")

    key = processors.register([count_down])
    sampler, seqs = _three(Sampling(processors=key, logprobs=1, temperature=1.0))
    processors.release(key)  # the slot keeps what it began with
    results = [step(sampler, seqs, LOGITS, [1, 0, 2]) for _ in range(3)]
    assert seen == [[[0, 1]], [[0, 1, 2]], [[0, 1, 2, 1]]]
    assert seqs[1].output[:2] == [2, 1]
    assert [result.errors.keys() for result in results] == [set(), set(), {0}]
    assert results[2].errors[0] == "logits_processor: KeyError: 'lost'"
    assert seqs[0].output == [3, 3, 3] and seqs[2].output == [3, 2, 1]
    # raw log-probabilities are of what the model said, not of what the processor wrote
    assert results[0].logprobs[0].ids.tolist() == [[2, 3]] and results[0].logprobs[0].ranks.tolist() == [2]


def test_processor_cannot_bring_padded_ids_back() -> None:
    def flatten(req_id, logits, token_ids, stream_ptr, client_id):
        logits[:] = 0.0
        logits[..., 3] = 5.0

    key = processors.register([flatten])
    seq = Sequence(Sampling(processors=key), [0])
    sampler = new_sampler([seq], vocab=4, num_valid=3)
    assert step(sampler, [seq], LOGITS[:1], [0]).tokens.tolist() == [0]
    processors.release(key)


def test_processed_logprobs_follow_the_processor() -> None:
    def favour(req_id, logits, token_ids, stream_ptr, client_id):
        logits[..., 0] = 50.0

    key = processors.register([favour])
    seq = Sequence(Sampling(processors=key, logprobs=0, processed_logprobs=True), [0])
    sampler = new_sampler([seq], vocab=4)
    found = step(sampler, [seq], LOGITS[:1], [0]).logprobs[0]
    assert found.ids.tolist() == [[0]] and abs(float(found.values[0, 0])) < 1e-6
    processors.release(key)


def test_processors_see_drafts_as_output() -> None:
    seen: list[list[int]] = []

    def look(req_id, logits, token_ids, stream_ptr, client_id):
        seen.extend(token_ids)

    key = processors.register([look])
    sampler = new_sampler([Sequence(Sampling(processors=key), [0, 1])], vocab=4)
    processors.release(key)
    pending = torch.tensor([[-1, -1], [2, -1], [2, 3]])
    sampler.choose(LOGITS.clone(), torch.zeros(3, dtype=torch.int64), torch.tensor([2, 3, 4]), pending=pending)
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
