"""Recurrent states: a small hybrid model whose answers do not depend on chunks, neighbours, or snapshots."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.groups import group_layers
from headrace.engine.rank import Rank
from headrace.engine.states import ALIGN_BYTES, States, state_bytes, state_specs
from headrace.layers.port import Act, ForwardStep, LiveState, Model, RecurrentLayer, StateSpec
from headrace.seam import DEVICE, HOST, Ints, int_rows
from tests.engine.driver import BLOCK, NUM_BLOCKS, Driver, open_rank, straight
from tests.twin.harness import VOCAB, tiny_llama

HIDDEN = 32
RECURRENT = 1
"""Its group: the first layer attends."""
COUNT = 10


class ToyLayer:
    """A short convolution into a leaky sum, a token at a time: 4 tanh(sum of the last 3 inputs + 0.9 * state)."""

    def __init__(self, seed: int) -> None:
        self.state = StateSpec(((HIDDEN,), (2, HIDDEN)), (torch.float32, torch.float32))
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed))

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        residual = residual if partial is None else residual + partial
        return residual, residual

    def mix(self, mixer_input: Any, mixer: LiveState) -> Act:
        sums, inputs = mixer.tensors
        starts = mixer.step.query_starts.tolist()
        out = torch.empty_like(mixer_input)
        for row, slot in enumerate(mixer.step.slots.tolist()):
            for at in range(starts[row], starts[row + 1]):
                token = torch.mv(self.weight, mixer_input[at] / mixer_input[at].norm())
                sums[slot] = torch.tanh(0.9 * sums[slot] + token + inputs[slot].sum(0))
                inputs[slot] = torch.stack([inputs[slot, 1], token])
                out[at] = 4 * sums[slot]
        return Act(out)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        return mixed.data, residual


class Hybrid:
    """A decoder with a recurrent layer after each of its own."""

    def __init__(self, decoder: Model) -> None:
        self.decoder = decoder
        self.layers = [each for at, layer in enumerate(decoder.layers) for each in (layer, ToyLayer(at))]
        self.vocab_size = decoder.vocab_size
        self.max_position = decoder.max_position
        self.ropes, self.embed = decoder.ropes, decoder.embed
        self.final, self.head, self.weight_map = decoder.final, decoder.head, decoder.weight_map


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    rank = open_rank(folder)
    make_hybrid(rank)
    yield Driver(rank, host_blocks=(NUM_BLOCKS, NUM_BLOCKS))
    rank.close()


def make_hybrid(rank: Rank) -> None:
    model: Any = Hybrid(rank.model)
    rank.model = model
    rank.groups = group_layers(model.layers, torch.float32)
    assert [group.is_recurrent for group in rank.groups] == [False, True]
    assert rank.groups[RECURRENT].layers == (1, 3)


def prompt(length: int) -> list[int]:
    return [random.Random(f"state {at}").randrange(VOCAB) for at in range(length)]


def save(slot: int, block: int) -> Ints:
    return int_rows([(RECURRENT, slot, block)], 3)


def restore(block: int, slot: int) -> Ints:
    return int_rows([(RECURRENT, block, slot)], 3)


def test_the_state_matters(driver: Driver) -> None:
    """Otherwise the other tests would say nothing."""
    ids = prompt(9)
    expected = straight(driver, ids, COUNT)
    driver.begin(1)
    driver.rows({1: ids[:5]})
    for tensors in driver.rank.memory.states.layers.values():
        tensors[0][1] = 0
    tokens = [int(driver.rows({1: ids[5:]}).tokens[0]), *driver.generate(1, COUNT - 1)]
    assert tokens != expected


@pytest.mark.parametrize("chunk", [1, 2, 3, BLOCK, 7])
def test_chunks_equal_whole(driver: Driver, chunk: int) -> None:
    ids = prompt(13)
    expected = straight(driver, ids, COUNT)
    driver.begin(2)
    for at in range(0, len(ids), chunk):
        tokens = driver.rows({2: ids[at : at + chunk]}).tokens.tolist()
    assert [*tokens, *driver.generate(2, COUNT - 1)] == expected


def test_neighbours_do_not_matter(driver: Driver) -> None:
    ids, others = prompt(13), prompt(30)[13:]
    expected, theirs = straight(driver, ids, COUNT), straight(driver, others, COUNT)
    driver.begin(3)
    driver.begin(1)
    driver.rows({3: others[:6], 1: ids[:5]})
    one, three = driver.rows({1: ids[5:], 3: others[6:]}).tokens.tolist()
    got = {1: [one], 3: [three]}
    while len(got[1]) < COUNT:
        three, one = driver.rows({3: None, 1: None}).tokens.tolist()
        got[1].append(one)
        got[3].append(three)
    assert got == {1: expected, 3: theirs}


def test_a_restored_snapshot_equals_computing_again(driver: Driver) -> None:
    """Its chunk ends at the snapshot; later the state and the KV go on from there, in another slot."""
    ids = prompt(3 * BLOCK + 2)
    cut = 2 * BLOCK
    expected = straight(driver, ids, COUNT)
    driver.begin(1)
    driver.rows({1: ids[:cut]}, saves=save(1, 7))
    driver.rows({1: ids[cut:]})
    driver.generate(1, 3)
    shared = driver.tables[1][0]
    driver.begin(2, length=cut)
    copies = [(at, 0, DEVICE, shared[at], DEVICE, block) for at, block in enumerate(driver.tables[2][0])]
    first = driver.rows({2: ids[cut:]}, copies=int_rows(copies, 6), restores=restore(7, 2))
    assert [int(first.tokens[0]), *driver.generate(2, COUNT - 1)] == expected


def test_a_snapshot_comes_back_from_the_host(driver: Driver) -> None:
    ids = prompt(2 * BLOCK + 1)
    expected = straight(driver, ids, COUNT)
    driver.begin(1)
    driver.rows({1: ids[:BLOCK]}, saves=save(1, 7))
    driver.step({}, copies=int_rows([(1, RECURRENT, DEVICE, 7, HOST, 5)], 6))
    driver.rank.memory.pools.arenas[RECURRENT].fill_(255)
    kept = driver.tables[1][0][0]
    driver.begin(2, length=BLOCK)
    copies = [(2, RECURRENT, HOST, 5, DEVICE, 9), (3, 0, DEVICE, kept, DEVICE, driver.tables[2][0][0])]
    first = driver.rows({2: ids[BLOCK:]}, copies=int_rows(copies, 6), restores=restore(9, 2))
    assert [int(first.tokens[0]), *driver.generate(2, COUNT - 1)] == expected


def test_a_slot_begins_with_zeros(driver: Driver) -> None:
    ids = prompt(6)
    expected = straight(driver, ids, COUNT)
    assert straight(driver, ids, COUNT) == expected  # the same slot again


def test_a_sequence_that_has_ended_leaves_its_state_alone(driver: Driver) -> None:
    """A plan in flight may have a row of it: its snapshot was taken before."""
    ids = prompt(6)
    driver.begin(1, max_len=len(ids) + 1)
    driver.rows({1: ids})
    before = [tensor[1].clone() for tensors in driver.rank.memory.states.layers.values() for tensor in tensors]
    assert not len(driver.rows({1: None}).tokens)
    after = [tensor[1] for tensors in driver.rank.memory.states.layers.values() for tensor in tensors]
    assert all(torch.equal(old, new) for old, new in zip(before, after))


def test_a_failed_step_saves_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("a bug")

    driver.begin(1)
    driver.rows({1: prompt(4)}, saves=save(1, 7))
    snapshot = driver.rank.memory.pools.arenas[RECURRENT][7].clone()
    assert snapshot.any()
    monkeypatch.setattr(driver.rank.runner, "forward", broken)
    assert driver.rows({1: None}, saves=save(1, 7)).errors
    assert torch.equal(driver.rank.memory.pools.arenas[RECURRENT][7], snapshot)


# ---- rows of states ------------------------------------------------------------------------------


def test_tensors_of_a_row_are_aligned_and_apart() -> None:
    specs = {
        0: StateSpec(((3,), (2, 5)), (torch.bfloat16, torch.float32)),
        2: StateSpec(((), (7,)), (torch.int64, torch.int8)),
    }
    assert state_bytes(specs.values()) == 16 + 48 + 16 + 16 and state_bytes(()) == 0

    class Layer:
        spec = None

    assert not isinstance(Layer(), RecurrentLayer) and isinstance(ToyLayer(0), RecurrentLayer)
    assert list(state_specs([Layer(), ToyLayer(0)])) == [1]


def test_views_do_not_overlap() -> None:
    specs = {
        0: StateSpec(((3,), (2, 5)), (torch.bfloat16, torch.float32)),
        2: StateSpec(((), (7,)), (torch.int64, torch.int8)),
    }
    layers: Any = [ToyLayer(0), None, ToyLayer(1)]
    for index, spec in specs.items():
        layers[index].state = spec
    (group,) = group_layers([layers[0], layers[2]], torch.float32)
    group = type(group)((0, 2), 0, 0, "float32", state_bytes=group.state_bytes)
    states = States((group,), specs, num_slots=3)
    views = [view for index in (0, 2) for view in states.layers[index]]
    for value, view in enumerate(views, 1):
        view.fill_(value)
    assert [view.unique().tolist() for view in views] == [[1], [2], [3], [4]]
    assert [view.shape for view in views] == [(4, 3), (4, 2, 5), (4,), (4, 7)]
    assert all(view.data_ptr() % ALIGN_BYTES == 0 for view in views)
    states.begin([1, 2])
    assert [
        view.float().flatten(1).sum(1).eq(0).tolist() if view.dim() > 1 else view.eq(0).tolist() for view in views
    ] == [[False, True, True, False]] * 4


def test_without_recurrent_layers_there_is_nothing() -> None:
    states = States((), {}, num_slots=3)
    states.begin([0, 1])
    assert not states.layers
