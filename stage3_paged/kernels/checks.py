"""What every kernel asks of its arguments, checked before a pointer is made from them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from common.errors import InvalidValue


class Layout(NamedTuple):
    """All that can be checked of a tensor without looking at its numbers.

    What is found right of layouts stays right, so a kernel may remember it: see `cpu._plan_attention`.
    """

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        return cls(tensor.device, tensor.dtype, tensor.shape, tensor.stride())


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
    check_store_layouts(*map(Layout.of, (k, v, k_cache, v_cache, slot_mapping)))


def check_store_layouts(k: Layout, v: Layout, k_cache: Layout, v_cache: Layout, slot_mapping: Layout) -> None:
    """The same of their layouts."""
    _check_caches(k_cache, v_cache)
    num_heads, head_size = k_cache.shape[2:]
    rows = f"[T, {num_heads}, {head_size}] as the cache has it"
    for name, array in (("k", k), ("v", v)):
        if len(array.shape) != 3 or array.shape[1:] != k_cache.shape[2:] or array.shape[0] != k.shape[0]:
            raise InvalidValue(f"{name}.shape", tuple(array.shape), rows)
        _check_like(name, array, k_cache)
    if slot_mapping[:3] != (k.device, torch.int64, k.shape[:1]):
        allowed = f"int64 of shape ({k.shape[0]},) on {k.device}"
        raise InvalidValue("slot_mapping", slot_mapping[:3], allowed)


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> None:
    """Refuse arguments of `paged_attention` that do not fit together.

    Raises:
        InvalidValue: naming the argument, what it is and what it must be.
    """
    check_attention_layouts(
        Layout.of(q),
        Layout.of(k_cache),
        Layout.of(v_cache),
        Layout.of(block_tables),
        Layout.of(query_start),
        Layout.of(seq_lens),
        None if out is None else Layout.of(out),
        None if lse is None else Layout.of(lse),
        scale,
        window,
    )


def check_attention_layouts(
    q: Layout,
    k_cache: Layout,
    v_cache: Layout,
    block_tables: Layout,
    query_start: Layout,
    seq_lens: Layout,
    out: Layout | None,
    lse: Layout | None,
    scale: float,
    window: int | None,
) -> None:
    """The same of their layouts."""
    _check_caches(k_cache, v_cache)
    num_kv_heads, head_size = k_cache.shape[2:]
    if len(q.shape) != 3 or q.shape[2] != head_size or q.shape[1] % num_kv_heads:
        allowed = f"[T, a multiple of {num_kv_heads}, {head_size}] as the cache has it"
        raise InvalidValue("q.shape", tuple(q.shape), allowed)
    _check_like("q", q, k_cache)
    if out is not None:
        if out.shape != q.shape:
            raise InvalidValue("out.shape", tuple(out.shape), f"{tuple(q.shape)} as q has it")
        _check_like("out", out, k_cache)
    if lse is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        wanted = q.device, wide, q.shape[:2]
        if lse[:3] != wanted or lse.stride != (q.shape[1], 1):
            raise InvalidValue("lse", tuple(lse), f"{wanted}, contiguous")
    num_seqs = seq_lens.shape.numel()
    for name, array, shape in (
        ("seq_lens", seq_lens, (num_seqs,)),
        ("query_start", query_start, (num_seqs + 1,)),
        ("block_tables", block_tables, (num_seqs, block_tables.shape[-1])),
    ):
        if array[:3] != (q.device, torch.int32, shape) or array.stride[-1] != 1:
            allowed = f"int32 of shape {shape} on {q.device}, last dimension contiguous"
            raise InvalidValue(name, tuple(array), allowed)
    if not 0 < scale < math.inf:  # masked scores are -inf, and are to stay that
        raise InvalidValue("scale", scale, "above 0")
    if window is not None and window < 1:
        raise InvalidValue("window", window, "None or at least 1")


def _check_caches(k: Layout, v: Layout) -> None:
    """Both caches `[N, bs, Hkv, D]`, laid out alike, with a block size that is a power of two."""
    if len(k.shape) != 4 or k.stride[-1] != 1:
        raise InvalidValue(
            "k_cache", (tuple(k.shape), k.stride), "[N, bs, Hkv, D], last dimension contiguous"
        )
    if (v.shape, v.stride) != (k.shape, k.stride):
        shown, wanted = (tuple(v.shape), v.stride), (tuple(k.shape), k.stride)
        raise InvalidValue("v_cache", shown, f"{wanted} as k_cache")
    check_block_size(k.shape[1])


def check_block_size(block_size: int) -> None:
    """Refuse block sizes that are no power of two: kernels divide by shifting."""
    if block_size < 1 or block_size & (block_size - 1):
        raise InvalidValue("block_size", block_size, "a power of two")


def _check_like(name: str, array: Layout, cache: Layout) -> None:
    """Rows of the cache's dtype on the cache's device, each head in one piece."""
    if (array.device, array.dtype) != (cache.device, cache.dtype):
        shown = (array.dtype, array.device)
        raise InvalidValue(name, shown, f"{cache.dtype} on {cache.device} as the cache")
    if array.stride[-1] != 1:
        raise InvalidValue(f"{name}.stride()", array.stride, "a contiguous last dimension")
