"""Contexts of rows with one token, dealt among programs: nothing is lost, and both decode kernels keep the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from headrace.attention.port import AttentionStep
from headrace.kernels import _triton_latent as latent
from headrace.kernels import _triton_latent_parts as parts
from headrace.kernels._triton_latent_parts import LatentPlan, deal, num_parts_of, part_size
from headrace.kernels.quantise import FP8
from tests.kits.interpreter import DEVICES

SCALE = 192**-0.5


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _dealt_kernel(kv_lens, out, num_rows, num_parts, ROWS: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0)
    row, first, part = deal(kv_lens, num_rows, num_parts, 0, program, ROWS, 32, 8, 0, TILE, False, False)
    tl.store(out + program * 3, row)
    tl.store(out + program * 3 + 1, first)
    length = tl.load(kv_lens + row, mask=row < num_rows, other=0)
    tl.store(out + program * 3 + 2, part_size(length, part, TILE, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "lengths", [[100], [0], [1, 0, 500], [64] * 9, [1000, 1, 1, 1], list(range(0, 220, 20))], ids=str
)
@pytest.mark.parametrize("num_parts", [1, 7])
def test_all_tokens_are_dealt_once(device: str, lengths: list[int], num_parts: int) -> None:
    """Each row has a program at least, and there are programs enough."""
    programs = len(lengths) + num_parts
    out = torch.full((programs, 3), -1, dtype=torch.int32, device=device)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    _dealt_kernel[(programs,)](kv_lens, out, len(lengths), num_parts, ROWS=16, TILE=16)
    dealt = out.tolist()
    for row, length in enumerate(lengths):
        mine = [(program, first, size) for program, (at, first, size) in enumerate(dealt) if at == row]
        assert mine and {size for _, _, size in mine} == {mine[0][2]} and mine[0][2] % 16 == 0
        begins = [(program - first) * size for program, first, size in mine]
        assert begins == [number * mine[0][2] for number in range(len(mine))] and len(mine) <= 8
        assert begins[-1] < max(length, 1) <= begins[-1] + mine[0][2]
    assert all(row <= len(lengths) for row, _, _ in dealt)


def test_rows_of_one_length_stay_whole_where_they_fill_the_card() -> None:
    def parts_of(num_rows: int, length: int, head_tiles: int) -> int:
        part = max(-(-num_rows * length // num_parts_of(num_rows, head_tiles)), parts.MIN_PART)
        return -(-length // part)

    assert [parts_of(rows, 4096, 2) for rows in (64, 128, 256, 1024)] == [1, 1, 1, 1]
    assert parts_of(8, 32768, 2) == 8 and parts_of(33, 4096, 2) == 2
    assert parts_of(1, 4096, 2) >= 30
    assert parts_of(64, 4096, 1) == 2 and parts_of(20, 4096, 2) == 3


@dataclass
class Rows:
    """Rows of one token behind `num_context_rows` others of one, which don't attend."""

    step: AttentionStep
    q: Tensor
    turned: Tensor
    cache: Tensor
    first: int
    out: Tensor

    def attend(self, *, is_portable: bool, num_parts: int | None = None) -> Tensor:
        end, (num_heads, rank) = len(self.step.kv_lens), self.q.shape[1:]
        plan = latent.plan_latent(
            end - self.first, num_heads, rank, dtype=self.q.dtype, max_kv=self.step.max_kv, device=self.q.device
        )
        if num_parts is not None:
            shape = (end - self.first + num_parts, num_heads, rank + parts.PART_ENDS)
            partial = torch.full(shape, torch.nan, device=self.q.device)
            plan = LatentPlan(
                num_parts, partial, torch.full((end, 2), 1 << 20, dtype=torch.int32, device=self.q.device)
            )
        rows, common = (self.first, end), {"out": self.out, "scale": SCALE, "first_token": self.first}
        if is_portable:
            latent.launch_portable(
                self.q, self.turned, self.cache, self.step, rows=rows, plan=plan, max_query=1, window=None,
                sink_tokens=0, v_scale=1.0, chosen=None, **common,
            )  # fmt: skip
        else:
            assert latent.attend_on_hopper(self.q, self.turned, self.cache, self.step, rows=rows, plan=plan, **common)
        if plan.num_parts:
            parts.launch_merge(plan, self.out, self.step, rows=rows, first_token=self.first, v_scale=1.0)
        return self.out

    def reference(self) -> Tensor:
        rank, rope_dim = self.q.shape[2], self.cache.shape[2] - self.q.shape[2]
        outs = []
        for row, length in enumerate(self.step.kv_lens.tolist()[self.first :]):
            blocks = self.step.block_tables[self.first + row, : -(-length // self.step.block_size)].long()
            vectors = self.cache[blocks].double().flatten(0, 1)[:length]
            query = torch.cat([self.q[row], self.turned[self.first + row, :, -rope_dim:]], -1).double()
            outs.append(torch.softmax(query @ vectors.T * SCALE, -1) @ vectors[:, :rank])
        return torch.stack(outs)


def rows_of(
    lengths: Sequence[int],
    *,
    device: str,
    block_size: int = 32,
    dims: tuple[int, int, int] = (128, 512, 64),
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    num_context_rows: int = 2,
) -> Rows:
    """What is behind a row's last token, and in blocks of nobody, is no number."""
    num_heads, rank, rope_dim = dims
    lengths = [1] * num_context_rows + list(lengths)
    counts = [-(-max(length, 1) // block_size) for length in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    cache = torch.full((sum(counts) + 1, block_size, rank + rope_dim), torch.nan, dtype=dtype)
    for row, blocks in enumerate((torch.randperm(sum(counts)) + 1).split(counts)):
        tables[row, : len(blocks)] = blocks
        for at, block in enumerate(blocks.tolist()):
            there = max(0, min(block_size, lengths[row] - at * block_size))
            cache[block, :there] = torch.randn(there, rank + rope_dim, dtype=dtype)
    num = len(lengths)
    step = AttentionStep(
        block_size=block_size,
        query_starts=torch.arange(num + 1, dtype=torch.int32, device=device),
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        positions=torch.tensor(lengths, device=device) - 1,
        block_tables=tables.to(device),
        write_slots=torch.zeros(num, dtype=torch.int64, device=device),
        max_query=1,
        max_kv=max(lengths),
        num_context_rows=num_context_rows,
    )
    q = torch.randn(num - num_context_rows, num_heads, rank, dtype=dtype)
    turned = torch.randn(num, num_heads, 8 + rope_dim, dtype=dtype)
    return Rows(
        step,
        q.to(device),
        turned.to(device),
        cache.to(kv_dtype or dtype).to(device),
        num_context_rows,
        torch.full_like(q, torch.nan).to(device),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_parts", [0, 4])
def test_rows_in_parts_are_merged(device: str, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MIN_PART", 16)
    monkeypatch.setattr(latent, "tuned", lambda *_, **__: (16, 16, 4, 1))
    made = rows_of([70, 1, 9], device=device, block_size=8, dims=(20, 24, 6), dtype=torch.float32)
    got = made.attend(is_portable=True, num_parts=num_parts)
    torch.testing.assert_close(got.double(), made.reference(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_without_tokens_is_zeros(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "tuned", lambda *_, **__: (16, 16, 4, 1))
    made = rows_of([0, 20], device=device, block_size=8, dims=(4, 16, 6), dtype=torch.float32)
    got = made.attend(is_portable=True, num_parts=2)
    assert got[0].eq(0).all()
    torch.testing.assert_close(got[1].double(), made.reference()[1], atol=2e-5, rtol=2e-5)


def test_where_the_kernel_for_hopper_fails_the_portable_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from headrace.kernels import _gluon_latent as gluon

    tries: list[str] = []

    def fail(*_: object, **__: object) -> None:
        tries.append("tried")
        raise AttributeError("no such product")

    monkeypatch.setattr(gluon, "launch_latent_rows", fail)
    monkeypatch.setattr(latent, "_is_hopper", lambda _: True)
    monkeypatch.setattr(latent, "_hopper_faults", [])
    made = rows_of([3], device="cpu", dims=(64, 512, 64), num_context_rows=0)
    other = rows_of([3], device="cpu", dims=(64, 512, 32), num_context_rows=0)
    for one in (other, made, made):
        plan = latent.plan_latent(1, 64, 512, dtype=one.q.dtype, max_kv=3, device=one.q.device)
        common = {"out": one.out, "scale": SCALE, "rows": (0, 1), "first_token": 0, "plan": plan}
        with caplog.at_level("INFO", logger="headrace"):
            assert not latent.attend_on_hopper(one.q, one.turned, one.cache, one.step, **common)
    assert tries == ["tried"] and caplog.text.count("no such product") == 1


LENGTHS = {
    "odd": [1, 63, 64, 65, 700, 4101, 33, 129],
    "alike": [300] * 70,
    "one": [5000],
    "ragged": [1 + 97 * number for number in range(80)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("is_portable", [True, False], ids=["Triton", "Gluon"])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    ("block_size", "num_heads", "dtype"),
    [(32, 128, torch.bfloat16), (16, 64, torch.float16), (64, 192, torch.bfloat16)],
)
def test_the_sizes_of_deepseek_v3(
    is_portable: bool, name: str, block_size: int, num_heads: int, dtype: torch.dtype
) -> None:
    _skip_without_hopper(is_portable)
    torch.manual_seed(0)
    made = rows_of(LENGTHS[name], device="cuda", block_size=block_size, dims=(num_heads, 512, 64), dtype=dtype)
    want = made.reference()
    for num_parts in (None, 0, 1, 40, 300):
        made.out.fill_(torch.nan)
        _assert_close(made.attend(is_portable=is_portable, num_parts=num_parts), want)


@pytest.mark.gpu
def test_an_fp8_cache_of_deepseek_v3() -> None:
    made = rows_of(LENGTHS["odd"], device="cuda", kv_dtype=FP8)
    _assert_close(made.attend(is_portable=True), made.reference())


@pytest.mark.gpu
@pytest.mark.parametrize("is_portable", [True, False], ids=["Triton", "Gluon"])
def test_a_graph_reads_lengths_when_it_is_replayed(is_portable: bool) -> None:
    _skip_without_hopper(is_portable)
    made = rows_of([900] * 12, device="cuda")
    made.attend(is_portable=is_portable)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.attend(is_portable=is_portable)
    for lengths in ([900] * 12, list(range(1, 900, 75)), [0, 1, *[500] * 10]):
        made.step.kv_lens[made.first :] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        made.out.fill_(torch.nan)
        graph.replay()
        full = [row for row, length in enumerate(lengths) if length]
        assert all(made.out[row].eq(0).all() for row, length in enumerate(lengths) if not length)
        _assert_close(made.out[full], made.reference()[full])


@pytest.mark.gpu
@pytest.mark.parametrize("is_portable", [True, False], ids=["Triton", "Gluon"])
def test_a_million_tokens_far_back_in_the_cache(is_portable: bool) -> None:
    """Element numbers take more than 32 bits."""
    _skip_without_hopper(is_portable)
    length, block_size, num_blocks = 1 << 20, 32, 130_000
    torch.manual_seed(0)
    made = rows_of([5], device="cuda", dims=(64, 512, 64))
    cache = torch.empty(num_blocks, block_size, 576, dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros(made.step.block_tables.shape[0], length // block_size, dtype=torch.int32, device="cuda")
    tables[made.first] = num_blocks - 1 - torch.arange(length // block_size, device="cuda")
    cache[num_blocks - length // block_size :].normal_()
    made.step.kv_lens[made.first] = length
    step = replace(made.step, block_tables=tables, max_kv=length)
    far = Rows(step, made.q, made.turned, cache, made.first, made.out)
    _assert_close(far.attend(is_portable=is_portable), far.reference())


def _skip_without_hopper(is_portable: bool) -> None:
    if not is_portable and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernel is for Hopper")


def _assert_close(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
    assert error.max() < 0.012, error
