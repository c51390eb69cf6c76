"""Drawing tokens, rewriting logits and what surrounds a generation step: Triton against the torch twins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace.kernels import slot_table as columns
from headrace.kernels.accept_tokens import accept_tokens_twin
from headrace.kernels.decode_rows import decode_rows_twin
from headrace.kernels.draw_rows import draw_rows, draw_rows_twin
from headrace.kernels.row_noise import row_noise
from headrace.kernels.shape_logits import shape_logits_twin
from headrace.kernels.slot_table import SlotTable
from tests.kits.interpreter import DEVICES

OFF_P, OFF_MIN_P = math.inf, -math.inf
Filters = tuple[float, int, float, float]
"""(temperature, top_k, top_p, log min_p)"""
FILTERS: list[Filters] = [
    (0.0, 0, OFF_P, OFF_MIN_P),
    (1.0, 0, OFF_P, OFF_MIN_P),
    (1.0, 5, OFF_P, OFF_MIN_P),
    (1.0, 0, 0.9, OFF_MIN_P),
    (2.0, 0, OFF_P, math.log(0.1)),
    (50.0, 0, 0.9, OFF_MIN_P),  # wider than the candidates
    (9.0, 60, 0.5, math.log(0.01)),
]


def table_of(filters: Sequence[Filters], *, vocab: int = 1) -> SlotTable:
    floats = torch.zeros(len(filters), columns.NUM_FLOATS, dtype=torch.float64)
    whole = torch.full((len(filters), columns.NUM_INTS + 2), -1)
    for slot, (temperature, top_k, top_p, log_min_p) in enumerate(filters):
        floats[slot] = torch.tensor([temperature, top_p, log_min_p, 1.0, 0.0, 0.0])
        whole[slot, : columns.COUNTS] = torch.tensor([77 * slot - 5, top_k, 0, 100, 0])
    lists = torch.full((0, 1), -1), torch.zeros(0, 1)
    return SlotTable(floats, whole, torch.zeros(0, vocab, dtype=torch.int32), *lists)


def moved(table: SlotTable, device: str) -> SlotTable:
    tensors = (table.floats, table.ints, table.counts, table.bias_ids, table.bias_values)
    return SlotTable(*(tensor.to(device, copy=True) for tensor in tensors))


SMALL = (128, 256, 4)
"""(values of a program, candidates, warps)"""


def draw(
    logits: Tensor,
    table: SlotTable,
    device: str,
    *,
    position: int = 0,
    tuning: tuple[int, int, int] = SMALL,
    repeats: int = 1,
) -> tuple[list[int], list[int]]:
    """-> what the last launch draws, what the twin does"""
    from headrace.kernels._triton_draw import DrawTuning, launch_draw

    slots = torch.arange(len(logits)).flip(0)
    lengths = torch.arange(len(logits)) + position
    expected = draw_rows_twin(logits, slots, lengths, table, purpose=1)
    inputs = logits.to(device), slots.to(device), lengths.to(device), moved(table, device)
    found = torch.empty(0)
    for _ in range(repeats):
        found = launch_draw(*inputs, purpose=1, tuning=DrawTuning(*tuning))
    return found.tolist(), expected.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["smooth", "ties"])
def test_draws_equal_the_twins(device: str, kind: str) -> None:
    logits = torch.randn((len(FILTERS), 333), generator=torch.Generator().manual_seed(3)) * 3
    if kind == "ties":
        logits = logits.round().to(torch.bfloat16)
    found, expected = draw(logits, table_of(FILTERS), device)
    assert found == expected


@pytest.mark.parametrize("device", DEVICES)
def test_draws_with_more_candidates_than_have_room(device: str) -> None:
    """Rows without a peak, whose threshold is found by reading them again: equal, close and rounded values."""
    logits = torch.zeros((2, 40))
    logits[1] = torch.randn(40, generator=torch.Generator().manual_seed(1)) / 4096
    logits[:, 3] = -torch.inf
    # slots are in the other order
    filters = [(1.0, 0, 0.6, OFF_MIN_P), (1.0, 21, 0.5, OFF_MIN_P)]
    found, expected = draw(logits, table_of(filters), device, tuning=(64, 16, 4))
    assert found == expected


@pytest.mark.parametrize("device", DEVICES)
def test_draws_leave_the_counters_at_zero(device: str) -> None:
    from headrace.kernels import _triton_draw

    logits = torch.randn((3, 200), generator=torch.Generator().manual_seed(9))
    filters = [(1.0, 0, 0.8, OFF_MIN_P), (1.0, 3, OFF_P, OFF_MIN_P), (0.7, 0, OFF_P, OFF_MIN_P)]
    found, expected = draw(logits, table_of(filters), device, repeats=2)
    assert found == expected
    held = [tensor for tensors in _triton_draw._zeroed.values() for tensor in tensors]
    assert held and not any(tensor.any() for tensor in held)


def combinations(num_rows: int, seed: int) -> list[Filters]:
    """Rows with every combination of filters."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Filters] = []
    for row in range(num_rows):
        first, second, third, fourth = torch.rand(4, generator=generator).tolist()
        top_k = 1 + int(second * 60) if row & 1 else 0
        top_p = 0.05 + 0.94 * third if row & 2 else OFF_P
        rows.append((0.2 + 2 * first, top_k, top_p, math.log(0.001 + 0.1 * fourth) if row & 4 else OFF_MIN_P))
    return rows


@pytest.mark.parametrize("device", DEVICES)
def test_draws_of_many_rows(device: str) -> None:
    vocab = 1000 if device == "cuda" else 150
    num_rows = 800 if device == "cuda" else 16
    logits = torch.randn((num_rows, vocab), generator=torch.Generator().manual_seed(4)) * 4
    logits[::3, 40:] = -torch.inf
    logits[1::3] = (logits[1::3] * 2).round() / 2
    found, expected = draw(logits, table_of(combinations(num_rows, 2)), device)
    assert sum(one != two for one, two in zip(found, expected)) <= num_rows // 200


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "spread"), [(128_256, 3.0), (50_257, 24.0), (262_144, 0.3)])
@pytest.mark.parametrize("num_rows", [1, 40, 300])
def test_draws_of_a_whole_vocabulary(vocab: int, spread: float, num_rows: int) -> None:
    """The exponentials differ in their last bits, and with a target just there the token."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    logits = torch.randn((num_rows, vocab), generator=generator, device="cuda") * spread
    if num_rows == 40:
        logits = logits.bfloat16()
    table, lengths = moved(table_of(combinations(num_rows, 5)), "cuda"), torch.arange(num_rows, device="cuda")
    expected = draw_rows_twin(logits, lengths, lengths, table)
    found = draw_rows(logits, lengths, lengths, table)
    assert int((found != expected).sum()) <= num_rows // 20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = draw_rows(logits, lengths, lengths, table)
    for _ in range(3):
        again.zero_()
        graph.replay()
        assert torch.equal(again, found)


@pytest.mark.parametrize("device", DEVICES)
def test_draws_at_the_edges(device: str) -> None:
    """All banned, one left, all equal, infinite, not a number, more wanted than there is."""
    logits = torch.full((7, 150), -torch.inf)
    logits[1, 140] = -3.0
    logits[2] = 0.0
    logits[3, [4, 149]] = torch.inf
    logits[4, 7] = torch.nan
    logits[5, :3] = torch.tensor([1.0, -0.0, 0.0])
    logits[6] = -2.0
    found, expected = draw(logits, table_of([(1.0, 2, 0.6, OFF_MIN_P)] * 7), device, position=4)
    assert found == expected
    assert found[0] == 0 and found[1] == 140 and found[2] in (0, 1) and found[3] == 4 and found[4] == 7


def test_the_twin_draws_what_is_asked() -> None:
    """By hand: 0.6, 0.3, 0.1 in ids 2, 0, 1; top_p cuts the last, a tie at the edge keeps the smaller id."""
    weights = torch.tensor([0.3, 0.1, 0.6])
    table = table_of([(1.0, 0, 0.7, OFF_MIN_P)])
    zero = torch.zeros(1, dtype=torch.int64)
    for position in range(40):
        at = torch.tensor([position])
        noise = float(row_noise(table.ints[:1, columns.SEED], at, 0))
        token = int(draw_rows(weights.log()[None], zero, at, table))
        assert token == (0 if noise < 1 / 3 else 2)
    equal = torch.zeros(1, 4)
    drawn = {int(draw_rows(equal, zero, torch.tensor([at]), table_of([(1.0, 2, 1.0, 0.0)]))) for at in range(40)}
    assert drawn == {0, 1}


def rules(vocab: int) -> tuple[Tensor, Tensor, Tensor, SlotTable]:
    """Slots with bias, penalties, stop ids, all of them and none."""
    generator = torch.Generator().manual_seed(5)
    plain = table_of([FILTERS[1]] * 5, vocab=vocab)
    counts = torch.randint(0, 4, (2, vocab), generator=generator, dtype=torch.int32)
    bias_ids = torch.tensor([[3, vocab - 1, -1], [7, 0, 9]])
    bias_values = torch.tensor([[5.5, -torch.inf, 0.0], [0.25, 1.0, -100.0]])
    plain.floats[1:4, columns.REPETITION :] = torch.tensor([1.3, 0.5, 0.25], dtype=torch.float64)
    plain.ints[[1, 3], columns.COUNTS] = torch.tensor([0, 1])
    plain.ints[[0, 3], columns.BIASES] = torch.tensor([0, 1])
    plain.ints[2:4, columns.NUM_INTS :] = torch.tensor([[7, -1], [2, 7]])
    plain.ints[2:4, columns.MASK_LEN] = 6
    table = SlotTable(plain.floats, plain.ints, counts, bias_ids, bias_values)
    slots = torch.tensor([4, 2, 0, 3, 1])
    return torch.randn((5, vocab), generator=generator) * 3, slots, torch.tensor([3, 5, 9, 5, 2]), table


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_equal_the_twins(device: str, dtype: torch.dtype) -> None:
    from headrace.kernels._triton_sample import launch_shape

    logits, slots, lengths, table = rules(2100)
    logits = logits.to(dtype)
    expected = shape_logits_twin(logits, slots, lengths, table, num_valid=2090)
    found = launch_shape(
        logits.to(device), slots.to(device), lengths.to(device), moved(table, device), num_valid=2090
    ).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert expected[1, 7] == -torch.inf and expected[2, 2089] > -torch.inf and expected[2, 2095] == -torch.inf


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_equal_the_twins(device: str) -> None:
    from headrace.kernels._triton_slots import launch_decode_rows

    table = torch.arange(1, 6 * 40 + 1, dtype=torch.int32).view(6, 40)
    state = (torch.arange(6) + 100, torch.tensor([0, 5, 127, 31, 64, 9]), torch.tensor([False] * 5 + [True]))
    slots = torch.tensor([4, 5, 0, 2, 3])
    expected = decode_rows_twin(slots, *state, table[:, :33], block_size=4)
    last_token, num_tokens, done = (each.to(device) for each in state)
    found = launch_decode_rows(slots.to(device), last_token, num_tokens, done, table.to(device)[:, :33], block_size=4)
    for name, one, two in zip(expected._fields, expected, found):
        two = two.cpu()
        if name == "table":
            inside = torch.arange(33) <= expected.positions[:, None] // 4
            one, two = one.masked_fill(~inside, 0), two.masked_fill(~inside, 0)
        assert torch.equal(one, two), name


@pytest.mark.parametrize("device", DEVICES)
def test_acceptance_equals_the_twins(device: str) -> None:
    from headrace.kernels._triton_slots import launch_accept

    table = rules(30)[3]
    table.ints[:, columns.MIN_LEN] = 5
    table.ints[:, columns.MAX_LEN] = 12
    slots, tokens = torch.tensor([4, 2, 0, 3, 1]), torch.tensor([7, 7, 1, 2, 9])
    lengths, was_done = torch.tensor([3, 5, 11, 2, 4]), torch.tensor([True, False, False, False, False])
    logits = torch.zeros(5, 30)
    logits[4, 9] = torch.nan
    results = []
    for launch, place in ((accept_tokens_twin, "cpu"), (launch_accept, device)):
        own = moved(table, place)
        state = {"last_token": torch.zeros(5), "num_tokens": torch.zeros(5), "done": torch.zeros(5)}
        state = {name: each.to(place, torch.bool if name == "done" else torch.int64) for name, each in state.items()}
        rows = [each.to(place) for each in (tokens, logits, slots, lengths, was_done)]
        out = launch(rows[0], rows[1], rows[2], rows[3], rows[4], own, **state)
        results.append([out.cpu(), own.counts.cpu(), *(each.cpu() for each in state.values())])
    assert all(torch.equal(one, two) for one, two in zip(*results))
    assert results[0][4].tolist() == [True, True, True, False, True]
