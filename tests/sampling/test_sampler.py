"""The whole sampler against its twin, over steps, in batches of rows that ask for different things."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling import draw, rows
from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling.verify import verify
from headrace.seam import HOST_TOKEN, SAMPLE, ints
from headrace.types import Sampling
from tests.sampling import twin
from tests.sampling.driver import new_sampler, step
from tests.sampling.twin import Sequence

VOCAB, NUM_VALID = 11, 9
token_ids = st.integers(0, NUM_VALID - 1)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 1e-4, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 6, VOCAB, 1000]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.75, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.25]),
    prompt_ignore_length=st.integers(0, 3),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=2),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
    logprobs=st.sampled_from([-1, -1, 0, 3, VOCAB]),
    processed_logprobs=st.booleans(),
)
sequences = st.builds(
    Sequence,
    sampling=st.one_of(samplings, st.just(Sampling()), st.builds(Sampling, temperature=st.just(1.0))),
    prompt=st.lists(token_ids, min_size=1, max_size=5),
    min_tokens=st.integers(0, 3),
    max_len=st.integers(4, 9),
    stop_ids=st.lists(st.sampled_from([*range(NUM_VALID), -1, VOCAB + 5]), max_size=3).map(tuple),
)


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    """Bounds so small that every path runs on a vocabulary of eleven."""
    with (
        mock.patch.object(draw, "MAX_NARROW", 3),
        mock.patch.object(rows, "MAX_CHUNK_ELEMENTS", 2 * VOCAB),
    ):
        yield


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(sequences, min_size=1, max_size=6), st.booleans(), st.booleans(), st.data())
def test_equals_twin_over_steps(seqs: list[Sequence], narrow: bool, by_kernels: bool, data: st.DataObject) -> None:
    seqs = copy.deepcopy(seqs)
    with small_limits() if narrow else contextlib.nullcontext():
        sampler = new_sampler(seqs, vocab=VOCAB, num_valid=NUM_VALID, by_kernels=by_kernels)
        for _ in range(3):
            slots = data.draw(st.permutations(range(len(seqs))))
            rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
            logits = (rng.integers(-32, 33, (len(seqs), VOCAB)) / 8).tolist()
            before = copy.deepcopy(seqs)
            sampled = step(sampler, seqs, torch.tensor(logits), slots)
            assert sampled.errors == {}
            wanted = {row for row, slot in enumerate(slots) if seqs[slot].sampling.logprobs >= 0}
            assert sampled.logprobs.keys() == wanted
            for row, slot in enumerate(slots):
                token = int(sampled.tokens[row])
                assert token in twin.choose(logits[row], before[slot], num_valid_ids=NUM_VALID)
                assert bool(sampled.done[row]) == twin.is_done(seqs[slot], token)
                if row in wanted:
                    _check_logprobs(sampled, row, logits[row], before[slot], token)


def _check_logprobs(sampled: Sampled, row: int, logits: list[float], seq: Sequence, token: int) -> None:
    ids, values, rank = twin.logprobs(logits, seq, token, num_valid_ids=NUM_VALID)
    found = sampled.logprobs[row]
    assert found.ids.tolist() == [ids] and found.ranks.tolist() == [rank]
    assert np.isfinite(found.values).all()
    np.testing.assert_allclose(found.values[0], values, atol=1e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(sequences, min_size=2, max_size=6), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_neighbours_and_order_change_nothing(seqs: list[Sequence], seed: int, random) -> None:
    """A vocabulary past MAX_NARROW; the same rows alone, together, and together in another order."""
    vocab = 1500
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(seqs), vocab, generator=generator) * random.choice([0.1, 3.0])
    order = random.sample(range(len(seqs)), len(seqs))

    def run(batches: list[list[int]]) -> list[list[int]]:
        fresh = copy.deepcopy(seqs)
        sampler = new_sampler(fresh, vocab=vocab)
        for _ in range(3):
            for slots in batches:
                step(sampler, fresh, logits[slots], slots)
        return [seq.output for seq in fresh]

    alone = run([[slot] for slot in range(len(seqs))])
    assert run([list(range(len(seqs)))]) == alone
    assert run([order]) == alone


def greedy(logits: list[float], seq: Sequence) -> int:
    sampler = new_sampler([seq], vocab=len(logits))
    return int(step(sampler, [seq], torch.tensor([logits]), [0]).tokens[0])


def test_bias_bans_and_penalties_change_greedy() -> None:
    logits = [1.0, 3.0, 2.0]
    assert greedy(logits, Sequence(Sampling(), [0])) == 1
    assert greedy(logits, Sequence(Sampling(logit_bias={1: -100.0}), [0])) == 2
    assert greedy(logits, Sequence(Sampling(logit_bias={0: 100.0}), [0])) == 0
    assert greedy(logits, Sequence(Sampling(bad_words=((1,),)), [0])) == 2
    assert greedy(logits, Sequence(Sampling(bad_words=((0, 1),)), [2], [0])) == 2
    assert greedy(logits, Sequence(Sampling(bad_words=((0, 1),)), [0], [])) == 1  # not generated
    assert greedy(logits, Sequence(Sampling(repetition_penalty=2.0), [1])) == 2
    assert greedy(logits, Sequence(Sampling(presence_penalty=1.5), [1])) == 1
    assert greedy(logits, Sequence(Sampling(presence_penalty=1.5), [1], [1])) == 2
    assert greedy(logits, Sequence(Sampling(frequency_penalty=0.75), [0], [1])) == 1
    assert greedy(logits, Sequence(Sampling(frequency_penalty=0.75), [0], [1, 1])) == 2
    assert greedy(logits, Sequence(Sampling(no_repeat_ngram_size=2), [0, 1, 0])) == 2


def test_greedy_ties_go_to_the_smaller_id() -> None:
    assert greedy([1.0, 2.0, 2.0, 2.0], Sequence(Sampling(), [0])) == 1


def test_min_tokens_boundary() -> None:
    """[A, EOS] with min_tokens 2 doesn't end; the prompt isn't counted; EOS may come third."""
    eos = 0
    seq = Sequence(Sampling(), prompt=[3] * 50, min_tokens=2, stop_ids=(eos,))
    sampler = new_sampler([seq], vocab=4)
    wants_eos = torch.tensor([[9.0, 1.0, 2.0, 0.0]])
    results = [step(sampler, [seq], wants_eos, [0]) for _ in range(3)]
    assert seq.output == [2, 2, eos]
    assert [bool(result.done) for result in results] == [False, False, True]


def test_a_stop_id_before_min_tokens_does_not_end() -> None:
    """Every id is a stop id, so one comes though all are masked."""
    seq = Sequence(Sampling(), prompt=[3], min_tokens=2, stop_ids=(0, 1, 2, 3))
    sampler = new_sampler([seq], vocab=4)
    done = [bool(step(sampler, [seq], torch.zeros(1, 4), [0]).done) for _ in range(3)]
    assert done == [False, False, True]


def test_without_known_eos_nothing_is_masked() -> None:
    for stop_ids in [(), (-1,), (99,)]:
        seq = Sequence(Sampling(), prompt=[1], min_tokens=5, stop_ids=stop_ids)
        sampler = new_sampler([seq], vocab=4)
        last_is_best = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        result = step(sampler, [seq], last_is_best, [0])
        assert result.tokens.tolist() == [3] and result.done.tolist() == [False]


def test_done_at_max_len() -> None:
    seq = Sequence(Sampling(), prompt=[1, 1], max_len=4)
    sampler = new_sampler([seq], vocab=4)
    assert [bool(step(sampler, [seq], torch.zeros(1, 4), [0]).done) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-4),
        Sampling(temperature=1.0, top_p=1e-12),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=9e-6),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=1e-5, top_k=5000, top_p=0.5, min_p=0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_edge_values_are_greedy_in_a_mixed_batch(sampling: Sampling, scale: float) -> None:
    logits = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.0, 1.0, 0.5, 0.0], [1.0, 0.0, 0.0, 2.0]]) * scale
    seqs = [Sequence(Sampling(), [0]), Sequence(sampling, [0]), Sequence(Sampling(temperature=1.0, top_p=0.9), [0])]
    sampler = new_sampler(seqs, vocab=4)
    tokens = step(sampler, seqs, logits, [0, 1, 2]).tokens.tolist()
    assert tokens[:2] == [2, 1] and 0 <= tokens[2] < 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.99)])
def test_padded_ids_never_come(sampling: Sampling) -> None:
    sampling = Sampling(temperature=sampling.temperature, top_p=sampling.top_p, logit_bias={7: np.inf}, logprobs=20)
    logits = torch.zeros(200, 8)
    logits[:, 6:] = 50.0
    sampler = Sampler(1, 8, num_valid_ids=6, device="cpu")
    sampler.begin(Sequence(sampling, [0]).init(0))
    sampled = sampler.choose(logits, torch.zeros(200, dtype=torch.int64), torch.arange(200))
    assert int(sampled.tokens.max()) < 6
    assert all(set(found.ids[0].tolist()) <= set(range(6)) for found in sampled.logprobs.values())


def test_seeds_repeat_and_differ() -> None:
    def run(seed: int) -> list[int]:
        sampler = Sampler(1, 50, num_valid_ids=50, device="cpu")
        sampler.begin(Sequence(Sampling(temperature=1.0, seed=seed), [0]).init(0))
        rows_of_one = torch.zeros(40, dtype=torch.int64)
        return sampler.choose(torch.zeros(40, 50), rows_of_one, torch.arange(40)).tokens.tolist()

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(2**64 - 1) == run(-1)  # the same 64 bits


def test_int32_lengths_draw_the_same() -> None:
    sampler = Sampler(1, 50, num_valid_ids=50, device="cpu")
    sampler.begin(Sequence(Sampling(temperature=1.0, seed=2**63), [0]).init(0))
    slots, lengths = torch.zeros(9, dtype=torch.int64), torch.arange(9)
    drawn = [sampler.choose(torch.zeros(9, 50), slots, at).tokens.tolist() for at in (lengths, lengths.int())]
    assert drawn[0] == drawn[1]


def test_host_token_rows_only_report() -> None:
    seqs = [Sequence(Sampling(presence_penalty=50.0, logprobs=2), [0], max_len=2) for _ in range(2)]
    sampler = new_sampler(seqs, vocab=4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2)
    flags = ints([SAMPLE | HOST_TOKEN, SAMPLE])
    first = step(sampler, seqs, logits, [0, 1], row_flags=flags)
    assert first.tokens.tolist() == [3, 3] and first.done.tolist() == [False, True]
    assert first.logprobs[0].ids.tolist() == [[3, 3, 2]]
    second = step(sampler, seqs, logits, [0, 1], row_flags=flags)
    assert second.tokens.tolist() == [3, 2]  # only the second slot remembers its token


def test_slots_come_back_clean() -> None:
    loaded = Sampling(
        temperature=1.0,
        top_k=2,
        repetition_penalty=3.0,
        logit_bias={0: 100.0},
        bad_words=((3,), (1, 2)),
        no_repeat_ngram_size=1,
        logprobs=4,
    )
    sampler = new_sampler([Sequence(loaded, [1, 2], min_tokens=9, stop_ids=(3,))], vocab=4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert sampler.state.counts.num_used == 1
    sampler.free(0)
    sampler.free(0)
    assert sampler.state.counts.num_used == 0 and not sampler.state.specials
    plain = Sequence(Sampling(), [0])
    sampler.begin(plain.init(0))
    sampled = step(sampler, [plain], logits, [0])
    assert sampled.tokens.tolist() == [3] and sampled.logprobs == {}


def test_resuming_equals_going_on() -> None:
    """Preemption: the slot is freed and another begins with all tokens so far."""
    generator = torch.Generator().manual_seed(3)
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5, no_repeat_ngram_size=2, seed=5)
    straight, moved = (Sequence(sampling, [1, 2, 3]) for _ in range(2))
    one, two = new_sampler([straight], vocab=VOCAB), new_sampler([moved, moved], vocab=VOCAB)
    for at in range(8):
        logits = torch.randn(1, VOCAB, generator=generator)
        step(one, [straight], logits, [0])
        slot = at % 2
        two.free(1 - slot)
        two.begin(moved.init(slot))
        step(two, [moved, moved], logits, [slot])
    assert straight.output == moved.output


@settings(max_examples=60, deadline=None, derandomize=True)
@given(samplings, st.integers(0, 3), st.lists(token_ids, min_size=8, max_size=8), st.integers(0, 2**31))
def test_speculation_equals_one_by_one(sampling: Sampling, k: int, guesses: list[int], seed: int) -> None:
    """Logits depend on the position only; drafts are right or wrong at random; every accepted token counts."""
    table = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    plain, drafted = (Sequence(sampling, [1, 2], min_tokens=4, stop_ids=(3,)) for _ in range(2))
    sampler = new_sampler([plain], vocab=VOCAB, num_valid=NUM_VALID)
    while len(plain.output) < 8:
        step(sampler, [plain], table[len(plain.tokens)][None], [0])
    sampler = new_sampler([drafted], vocab=VOCAB, num_valid=NUM_VALID)
    while len(drafted.output) < 8:
        at = len(drafted.output)
        right = plain.output[at : at + k]
        wrong = guesses[at % 8]
        drafts = [token if wrong > 3 else wrong for token in right] + [0] * (k - len(right))
        slots = torch.zeros(k + 1, dtype=torch.int64)
        lengths = torch.arange(len(drafted.tokens), len(drafted.tokens) + k + 1)
        pending = torch.tensor([drafts[:i] + [-1] * (k - i) for i in range(k + 1)]).view(k + 1, k)
        chosen = sampler.choose(table[lengths], slots, lengths, pending=pending).tokens[None]
        accepted = verify(chosen, torch.tensor([drafts]).view(1, k), torch.tensor([k]))
        sampler.commit(chosen, host_slots=ints([0]), num_accepted=accepted)
        drafted.output += chosen[0, : int(accepted)].tolist()
    assert drafted.output[:8] == plain.output


def test_empty_batch() -> None:
    sampler = Sampler(1, 4, num_valid_ids=4, device="cpu")
    none = torch.zeros(0, dtype=torch.int64)
    sampled = sampler.sample(torch.zeros(0, 4), none, none)
    assert sampled.tokens.tolist() == [] and sampled.done.tolist() == [] and sampled.logprobs == {}
