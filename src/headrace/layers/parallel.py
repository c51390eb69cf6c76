"""Tensor parallelism: which share of a layer a rank holds, and how ranks combine what they computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

DEFAULT_TIMEOUT_S = 600.0


class Collectives(Protocol):
    """How the ranks of one tensor-parallel group combine tensors. Every rank makes the same calls in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; may overwrite and return its argument."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' equal-shaped tensors joined along `dim`, in rank order."""
        ...

    def close(self) -> None: ...


class SingleRank:
    """One rank: there is nothing to combine."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def close(self) -> None:
        pass


class Gloo:
    """CPU ranks, over torch.distributed's gloo backend."""

    def __init__(self, rank: int, size: int, *, init_method: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Joins the group; returns once all ranks have.

        Args:
            init_method: where ranks meet, such as `tcp://127.0.0.1:29500` or `file:///tmp/meeting` (a new file).
        """
        dist.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This rank's place in its tensor-parallel group."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=SingleRank)

    def share(self, total: int) -> tuple[int, int]:
        """[start, stop) of `total` units for this rank: contiguous, sizes differ by one at most."""
        return share(total, self.rank, self.size)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        return share_heads(num_heads, num_kv_heads, rank=self.rank, size=self.size)


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of `total` units for `rank`: contiguous, in rank order, larger shares first."""
    base, more = divmod(total, size)
    start = rank * base + min(rank, more)
    return start, start + base + (rank < more)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank, as [start, stop) over the model's heads."""

    q: tuple[int, int]
    kv: tuple[int, int]

    @property
    def num_heads(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv[1] - self.kv[0]


def share_heads(num_heads: int, num_kv_heads: int, *, rank: int, size: int) -> HeadShare:
    """Deal heads to ranks so that query heads sit with the KV head that they read.

    With at least as many KV heads as ranks, each rank takes whole groups (one more on the first ranks when they
    don't divide). With fewer, a KV head is replicated over several ranks and these share its query heads.

    Raises:
        ValueError: a rank would hold no query head.
    """
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        start, stop = share(num_kv_heads, rank, size)
        return HeadShare((start * group, stop * group), (start, stop))
    for kv_head in range(num_kv_heads):
        first, end = share(size, kv_head, num_kv_heads)
        if first <= rank < end:
            if end - first > group:
                break
            start, stop = share(group, rank - first, end - first)
            return HeadShare((kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1))
    raise ValueError(
        f"tensor_parallel_size {size} is too large for {num_heads} attention heads over {num_kv_heads} KV heads:"
        f" use at most {num_heads}"
    )
