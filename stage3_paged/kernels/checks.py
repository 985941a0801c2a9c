"""What every kernel asks of its arguments, checked before a pointer is made from them."""

from __future__ import annotations

from functools import cache

import torch

from common.errors import InvalidValue


def check_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Refuse arguments of `store_kv` that do not fit together.

    Raises:
        InvalidValue: naming the argument, what it is and what it must be.
    """
    _check_cache(k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride())
    num_heads, head_size = k_cache.shape[2:]
    rows = f"[T, {num_heads}, {head_size}] as the cache has it"
    for name, array in (("k", k), ("v", v)):
        if array.dim() != 3 or array.shape[1:] != (num_heads, head_size) or len(array) != len(k):
            raise InvalidValue(f"{name}.shape", tuple(array.shape), rows)
        _check_like(name, array, k_cache)
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != torch.int64:
        shown = (tuple(slot_mapping.shape), slot_mapping.dtype)
        raise InvalidValue("slot_mapping", shown, f"int64 of shape ({len(k)},)")


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> None:
    """Refuse arguments of `paged_attention` that do not fit together.

    Raises:
        InvalidValue: naming the argument, what it is and what it must be.
    """
    _check_cache(k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride())
    num_kv_heads, head_size = k_cache.shape[2:]
    if q.dim() != 3 or q.shape[2] != head_size or q.shape[1] % num_kv_heads:
        allowed = f"[T, a multiple of {num_kv_heads}, {head_size}] as the cache has it"
        raise InvalidValue("q.shape", tuple(q.shape), allowed)
    _check_like("q", q, k_cache)
    if out is not None:
        if out.shape != q.shape:
            raise InvalidValue("out.shape", tuple(out.shape), f"{tuple(q.shape)} as q has it")
        _check_like("out", out, k_cache)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse is not None and (lse.shape != q.shape[:2] or lse.dtype != wide or not lse.is_contiguous()):
        shown = (tuple(lse.shape), lse.dtype, lse.stride())
        raise InvalidValue("lse", shown, f"{wide} of shape {tuple(q.shape[:2])}, contiguous")
    num_seqs = seq_lens.numel()
    for name, array, shape in (
        ("seq_lens", seq_lens, (num_seqs,)),
        ("query_start", query_start, (num_seqs + 1,)),
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1])),
    ):
        if array.dtype != torch.int32 or array.shape != shape or array.stride(-1) != 1:
            shown = (tuple(array.shape), array.dtype, array.stride())
            raise InvalidValue(name, shown, f"int32 of shape {shape}, last dimension contiguous")
    if window is not None and window < 1:
        raise InvalidValue("window", window, "None or at least 1")


@cache
def _check_cache(
    k_shape: torch.Size, k_stride: tuple[int, ...], v_shape: torch.Size, v_stride: tuple[int, ...]
) -> None:
    """Both caches `[N, bs, Hkv, D]`, laid out alike, with a block size that is a power of two.

    It is remembered what was found right: a decode step asks once per layer, about caches that are all alike.
    """
    if len(k_shape) != 4 or k_stride[-1] != 1:
        raise InvalidValue(
            "k_cache", (tuple(k_shape), k_stride), "[N, bs, Hkv, D], last dimension contiguous"
        )
    if v_shape != k_shape or v_stride != k_stride:
        shown, wanted = (tuple(v_shape), v_stride), (tuple(k_shape), k_stride)
        raise InvalidValue("v_cache", shown, f"{wanted} as k_cache")
    check_block_size(k_shape[1])


def check_block_size(block_size: int) -> None:
    """Refuse block sizes that are no power of two: kernels divide by shifting."""
    if block_size < 1 or block_size & (block_size - 1):
        raise InvalidValue("block_size", block_size, "a power of two")


def _check_like(name: str, array: torch.Tensor, cache: torch.Tensor) -> None:
    """Rows of the cache's dtype on the cache's device, each head in one piece."""
    if array.dtype != cache.dtype or array.device != cache.device:
        shown = (array.dtype, array.device)
        raise InvalidValue(name, shown, f"{cache.dtype} on {cache.device} as the cache")
    if array.stride(-1) != 1:
        raise InvalidValue(f"{name}.stride()", array.stride(), "a contiguous last dimension")
