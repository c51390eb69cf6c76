"""Scatter new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels._native import dtype_flag, library, num_threads

__all__ = ["kv_write"]


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_slots: Tensor, block_size: int) -> None:
    """Write each token's K and V at its slot.

    Args:
        k, v: [tokens, kv_heads, dim].
        k_cache, v_cache: [num_blocks, kv_heads, block_size, dim]; values are converted to their dtype.
        write_slots: [tokens] int64, block * block_size + offset. Several tokens may share a slot of the dummy
            block 0 only; which of them stays there is undefined.
    """
    native = library() if k.is_cpu else None
    half, cache_half = dtype_flag(k), dtype_flag(k_cache)
    if native is None or half is None or cache_half is None or not _is_plain(k, v, k_cache, v_cache):
        kv_write_twin(k, v, k_cache, v_cache, write_slots, block_size)
        return
    assert v.dtype == k.dtype and v_cache.dtype == k_cache.dtype and k_cache.shape[2] == block_size
    native.hr_kv_write(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        write_slots.data_ptr(),
        *k.shape,
        k.stride(0),
        v.stride(0),
        k.stride(1),
        v.stride(1),
        block_size,
        k_cache.stride(0),
        v_cache.stride(0),
        k_cache.stride(1),
        half,
        cache_half,
        num_threads(),
    )


def _is_plain(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the tokens of a head and block lie one after another."""
    if k.stride(-1) != 1 or v.stride(-1) != 1 or k_cache.stride(1) != v_cache.stride(1):
        return False
    return k_cache.stride()[2:] == v_cache.stride()[2:] == (k.shape[-1], 1)


def kv_write_twin(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_slots: Tensor, block_size: int) -> None:
    """The plain torch form of `kv_write`."""
    blocks, offsets = write_slots // block_size, write_slots % block_size
    k_cache[blocks, :, offsets] = k.to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v.to(v_cache.dtype)
