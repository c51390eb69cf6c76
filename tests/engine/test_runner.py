"""Groups, pools, and the loop over layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.attention.port import AttentionSpec, AttentionStep
from headrace.attention.torch import TorchAttention
from headrace.engine.backends import Backends
from headrace.engine.groups import dtype_name, dtype_named, group_layers
from headrace.engine.pools import KvPools
from headrace.engine.runner import Runner
from headrace.kernels.quantise import PLAIN
from headrace.kernels.rope_write import Projected
from headrace.layers.port import Act, ForwardStep, Rope
from headrace.layers.weights import WeightMap
from tests.kits.model import BLOCK_SIZE, WINDOW, Row, Sequences, assert_close, make_case, prompt


class FakeLayer:
    """Writes down what the runner does. Its partial sum is its index, as is the mixer's answer."""

    def __init__(self, index: int, log: list[str], *, window: int | None = None, num_kv_heads: int = 1) -> None:
        self.index = index
        self.log = log
        self.spec = AttentionSpec(num_heads=2, num_kv_heads=num_kv_heads, head_dim=2, scale=1.0, window=window)

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        owed = None if partial is None else float(partial[0, 0])
        self.log.append(f"before {self.index} owed {owed} ropes {sorted(step.ropes)}")
        return residual, residual if partial is None else residual + partial

    def mix(self, mixer_input: Any, mixer: Any) -> Act:
        num_tokens, num_kv_heads = len(mixer_input), self.spec.num_kv_heads
        q = torch.full((num_tokens, 4), float(self.index))
        kv = torch.full((num_tokens, 4 * num_kv_heads), 10.0 + self.index)
        nothing = torch.empty(num_tokens, 0)
        return mixer(Projected(torch.cat([q, kv], 1), 2, num_kv_heads, nothing, nothing), PLAIN)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        self.log.append(f"after {self.index}")
        return torch.full_like(residual, float(self.index)), residual


class FakeModel:
    def __init__(self, layers: list[FakeLayer], log: list[str]) -> None:
        self.layers = layers
        self.log = log
        self.vocab_size = 7
        self.max_position = 64

    def weight_map(self) -> WeightMap:
        return WeightMap((), {})

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        self.log.append(f"ropes {positions.tolist()}")
        return {"all": Rope(positions, positions)}

    def embed(self, ids: Tensor) -> Tensor:
        self.log.append("embed")
        return ids[:, None].expand(-1, 3).float()

    def final(self, partial: Tensor | None, residual: Tensor) -> Act:
        assert partial is not None
        self.log.append(f"final {len(residual)}")
        return Act(residual + partial)

    def head(self, hidden: Act) -> Tensor:
        return hidden.data.sum(-1, keepdim=True).expand(-1, self.vocab_size)


class SpyAttention(TorchAttention):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def plan(self, step: AttentionStep) -> None:
        self.log.append(f"plan {step.write_slots.tolist()}")

    def run(self, packed: Projected, **rest: Any) -> Act:
        first = int(packed.qkv[0, 0])
        self.log.append(f"attend {first} slots {rest['step'].write_slots.tolist()} w {rest['spec'].window}")
        return super().run(packed, **rest)


def attention_step(slots: list[int]) -> AttentionStep:
    count = len(slots)
    return AttentionStep(
        block_size=4,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        kv_lens=torch.tensor([count], dtype=torch.int32),
        positions=torch.arange(count),
        block_tables=torch.tensor([[slots[0] // 4]], dtype=torch.int32),
        write_slots=torch.tensor(slots),
        max_query=count,
        max_kv=count,
        num_context_rows=1,
    )


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def runner(log: list[str]) -> Runner:
    """Three layers: the middle one in a group of its own."""
    layers = [FakeLayer(0, log), FakeLayer(1, log, window=2), FakeLayer(2, log)]
    groups = group_layers(layers, torch.float32)
    backends = Backends(chosen=[SpyAttention(log)])
    return Runner(FakeModel(layers, log), backends, KvPools(groups, [5, 3], block_size=4, backends=backends))


def test_the_loop_in_order(runner: Runner, log: list[str]) -> None:
    hidden = runner.forward(torch.tensor([5, 6]), [attention_step([16, 17]), attention_step([8, 9])])
    assert log == [
        "plan [16, 17]",
        "plan [8, 9]",
        "ropes [0, 1]",
        "embed",
        "before 0 owed None ropes ['all']",
        "attend 0 slots [16, 17] w None",
        "after 0",
        "before 1 owed 0.0 ropes ['all']",
        "attend 1 slots [8, 9] w 2",
        "after 1",
        "before 2 owed 1.0 ropes ['all']",
        "attend 2 slots [16, 17] w None",
        "after 2",
        "final 2",
    ]
    assert hidden.tolist() == [[8.0] * 3, [9.0] * 3]
    assert runner.logits(hidden).tolist() == [[24.0] * 7, [27.0] * 7]


def test_each_layer_writes_its_own_cache(runner: Runner) -> None:
    runner.forward(torch.tensor([5, 6]), [attention_step([16, 17]), attention_step([8, 9])])
    for layer, block in ((0, 4), (1, 2), (2, 4)):
        cache = runner.pools.layer(layer)
        written = cache.k.nonzero()[:, 0].unique().tolist()
        assert written == [block]
        assert cache.k[block, :, :2].unique().tolist() == [10.0 + layer]


def test_wanted_rows_only(runner: Runner, log: list[str]) -> None:
    steps = [attention_step([16, 17, 18]), attention_step([8, 9, 10])]
    hidden = runner.forward(torch.tensor([5, 6, 7]), steps, rows=torch.tensor([2, 0]))
    assert hidden.tolist() == [[10.0] * 3, [8.0] * 3] and log[-1] == "final 2"
    none = runner.forward(torch.tensor([5, 6, 7]), steps, rows=torch.zeros(0, dtype=torch.int64))
    assert none.shape == (0, 3)


def test_all_layers_have_to_want_lengths(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_long_prompts(rows: Any, spec: AttentionSpec) -> bool:
        return rows[0][0] > (10 if spec.window is None else 20)

    assert not runner.wants_lengths([(30, 30)])
    monkeypatch.setattr(runner.backends[0], "wants_lengths", of_long_prompts)
    assert [runner.wants_lengths([(count, count)]) for count in (5, 15, 30)] == [False, False, True]


def test_no_autograd(runner: Runner) -> None:
    hidden = runner.forward(torch.tensor([5]), [attention_step([16]), attention_step([8])])
    assert hidden.is_inference()


def test_groups_are_by_shape_and_window(log: list[str]) -> None:
    layers = [
        FakeLayer(0, log, window=8),
        FakeLayer(1, log),
        FakeLayer(2, log, window=8),
        FakeLayer(3, log, num_kv_heads=2),
        FakeLayer(4, log),
    ]
    groups = group_layers(layers, torch.bfloat16)
    assert [group.layers for group in groups] == [(0, 2), (1, 4), (3,)]
    assert [group.window for group in groups] == [8, None, None]
    assert [group.bytes_per_token for group in groups] == [2 * 2 * 2 * 2, 2 * 2 * 2 * 2, 2 * 2 * 2 * 2]
    assert {group.dtype for group in groups} == {"bfloat16"}


def test_pools_are_zero_and_of_the_backends_shape(runner: Runner) -> None:
    pools = runner.pools
    assert pools.num_layers == 3
    assert pools.layer(0).k.shape == (5, 1, 4, 2) and pools.layer(1).v.shape == (3, 1, 4, 2)
    assert all(not pools.layer(i).k.any() and not pools.layer(i).v.any() for i in range(3))
    assert pools.size_bytes == 4 * 2 * (5 + 3 + 5) * 4 * 2


def test_copies_stay_in_their_group(runner: Runner) -> None:
    pools = runner.pools
    for layer in range(3):
        for cache in (pools.layer(layer).k, pools.layer(layer).v):
            cache.copy_(torch.arange(len(cache), dtype=torch.float32)[:, None, None, None].expand_as(cache))
    pools.copy(0, torch.tensor([1, 2]), torch.tensor([3, 4]))
    for layer, want in ((0, [0, 1, 2, 1, 2]), (1, [0, 1, 2]), (2, [0, 1, 2, 1, 2])):
        assert pools.layer(layer).k[:, 0, 0, 0].tolist() == want
        assert pools.layer(layer).v[:, 0, 0, 0].tolist() == want


def test_dtype_names() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert dtype_named(dtype_name(dtype)) is dtype
    for name in ("int4x", "Tensor", "nn"):
        with pytest.raises(ValueError, match=f"unknown dtype '{name}'"):
            dtype_named(name)


def test_copied_blocks_are_as_good_as_computed_ones(tmp_path: Path) -> None:
    """A row that goes on from copies of another row's blocks, in both groups of a model with windows."""
    torch.set_num_threads(1)
    case = make_case(tmp_path, "gemma3_text")
    sequences, row = Sequences(case.model), Row()
    assert len(sequences.groups) == 2 and sequences.groups[0].window == WINDOW
    ids = prompt(3 * WINDOW)
    shared = 4 * BLOCK_SIZE
    sequences.step([(row, ids[:shared])])
    other = Row(blocks=[sequences.free.pop() for _ in row.blocks], num_cached=shared)
    for group in range(2):
        sequences.pools.copy(group, torch.tensor(row.blocks), torch.tensor(other.blocks))
    for layer in range(sequences.pools.num_layers):
        sequences.pools.layer(layer).k[row.blocks] = float("nan")
    (logits,) = sequences.step([(other, ids[shared:])])
    assert_close(logits, case.logits(ids)[shared:], "row over copied blocks")
