"""What every kernel must do: one file for `reference`, `cpu` and `triton`."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from paged_cases import DTYPES, Case, KernelUnderTest, Paged, batches, sweep, thinned
from support.interpreter import INTERPRETED

from common.errors import InvalidValue

MIXED = Case(batches(16)["mixed"])

HEADS = {
    8: {32: (2, 2), 64: (8, 2), 96: (8, 2), 128: (8, 2), 256: (8, 2)},
    16: {32: (9, 3), 64: (9, 3), 80: (8, 2), 96: (8, 1), 128: (2, 2), 256: (9, 3)},
}
"""Block size (16 stands for larger ones) -> head size -> (Hq, Hkv) that are tested with them.

The CPU kernel is compiled for each height of its tiles (query heads per KV head), width of scores (by block size) and
width of values (by head size), for seconds each: every two of these meet here, all three only now and then.  What else
is tested in this file stays within these shapes.
"""


def chosen() -> list[Case]:
    """Of the sweep, these shapes; and all groups of heads with blocks of 8 and heads of 80."""
    return [
        case
        for case in sweep()
        if case.heads == HEADS[min(case.block_size, 16)].get(case.head_size, case.heads)
    ]


@pytest.mark.parametrize("case", thinned() if INTERPRETED else chosen(), ids=str)
def test_equals_dense_attention(kernel: KernelUnderTest, case: Case) -> None:
    """Any block size, head size, group, batch, window and dtype agrees with attention over dense K/V."""
    paged = Paged(kernel, case)
    paged.check(paged.attend())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_writes_its_slots_and_no_other(kernel: KernelUnderTest, dtype: torch.dtype) -> None:
    """Read back bit for bit; the slots between stay as they were."""
    k_cache, v_cache = kernel.module.make_cache(6, 8, 3, 80, dtype, kernel.device)
    k_cache.fill_(7.0)
    v_cache.fill_(7.0)
    slots = torch.tensor([41, 3, 0, 8, 7, 47], device=kernel.device)
    k, v = torch.randn(2, 6, 3, 80, device=kernel.device).to(dtype)
    kernel.module.store_kv(k, v, k_cache, v_cache, slots)
    others = torch.tensor(sorted(set(range(48)) - set(slots.tolist())), device=kernel.device)
    for cache, written in ((k_cache, k), (v_cache, v)):
        assert torch.equal(kernel.module.gather(cache, slots), written)
        assert (kernel.module.gather(cache, others) == 7.0).all()


def test_float64(kernel: KernelUnderTest) -> None:
    """Stages are compared token for token in float64; GPU matrix units do not multiply it, so Triton refuses."""
    case = Case(batches(8)["mixed"], 8, 80, (8, 2), dtype=torch.float64)
    if kernel.name == "triton":
        with pytest.raises(InvalidValue, match=r"dtype: got torch\.float64"):
            Paged(kernel, case)
        return
    paged = Paged(kernel, case)
    lse = torch.empty(paged.q.shape[:2], dtype=torch.float64)
    paged.check(paged.attend(lse=lse), lse)


def test_without_host_lengths(kernel: KernelUnderTest) -> None:
    """The host's copies of the lengths save a wait and change nothing."""
    paged = Paged(kernel, MIXED)
    assert torch.equal(paged.attend(query_lens=None, context_lens=None), paged.attend())


def test_writes_to_out(kernel: KernelUnderTest) -> None:
    """`out` is what is returned."""
    paged = Paged(kernel, MIXED)
    out = torch.full_like(paged.q, float("nan"))
    assert paged.attend(out=out) is out
    paged.check(out)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", batches(8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_sum_exp(kernel: KernelUnderTest, dtype: torch.dtype, kind: str, window: int | None) -> None:
    """`lse` gets the natural logarithm of each softmax's sum, in float32, and the output stays the same."""
    paged = Paged(kernel, Case(batches(8)[kind], 8, 80, (8, 2), window, dtype))
    lse = torch.full(paged.q.shape[:2], float("nan"), device=paged.device)
    out = paged.attend(lse=lse)
    paged.check(out, lse)
    assert torch.equal(out, paged.attend())


def test_log_sum_exp_of_long_contexts(kernel: KernelUnderTest) -> None:
    """The same for contexts that several programs or threads share, and for a long query beside them."""
    length = 1100 if INTERPRETED else 3000
    paged = Paged(kernel, Case(((1, length), (1, 1), (20, 530)), 16, 32, (3, 1)))
    lse = torch.full(paged.q.shape[:2], float("nan"), device=paged.device)
    paged.check(paged.attend(lse=lse), lse)


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_unused_slots_take_no_part(kernel: KernelUnderTest, poison: float) -> None:
    """KNOWN_FAULTS B62: whatever the tail of the last block or a free block holds, not a bit changes."""
    case = Case(((1, 17), (1, 1), (3, 5), (1, 16), (18, 18)))
    assert torch.equal(Paged(kernel, case, poison).attend(), Paged(kernel, case, 0.0).attend())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_position_gives_its_value(kernel: KernelUnderTest, dtype: torch.dtype) -> None:
    """KNOWN_FAULTS B61: context 1 returns exactly V, also beside a sequence of 300."""
    paged = Paged(kernel, Case(((1, 1), (1, 300), (1, 3)), 8, 80, (8, 2), dtype=dtype))
    out = paged.attend()
    assert torch.equal(out[0], paged.v[0][0].repeat_interleave(4, dim=0))  # [Hq, D]
    paged.check(out)


@pytest.mark.parametrize("window", [None, 700])
def test_long_context(kernel: KernelUnderTest, window: int | None) -> None:
    """A context long enough for several programs or threads, alone and beside a short one."""
    length = 1100 if INTERPRETED else 5000
    for sequences in (((1, length),), ((1, 530), (2, 5))):
        paged = Paged(kernel, Case(sequences, block_size=64, head_size=32, heads=(3, 1), window=window))
        paged.check(paged.attend())


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 100])
def test_window_edges(kernel: KernelUnderTest, window: int) -> None:
    """The window ends inside a block, at its edge or before the sequence begins; in decodes and in chunks."""
    paged = Paged(
        kernel, Case(((1, 50), (9, 40), (33, 33), (1, 2)), head_size=32, heads=(3, 1), window=window)
    )
    paged.check(paged.attend())


def test_window_is_each_call_s_own(kernel: KernelUnderTest) -> None:
    """KNOWN_FAULTS B65: layers with and without a window read the same tables; a global one sees it all."""
    for window in (4, None, 4):
        paged = Paged(kernel, Case(((1, 12), (12, 12)), 8, 32, (4, 1), window))
        paged.check(paged.attend())
        paged.case = replace(paged.case, window=None)
        paged.check(paged.attend(window=None))


def test_strided_rows(kernel: KernelUnderTest) -> None:
    """q, k and v as views into one fused projection are handled as they are."""
    paged = Paged(kernel, replace(MIXED, sequences=((20, 20), (7, 7))))
    num_heads, num_kv_heads = paged.case.heads
    fused = torch.cat([paged.q, torch.cat(paged.k), torch.cat(paged.v)], dim=1)  # [T, Hq + 2 Hkv, D]
    paged.q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    for cache in paged.caches:
        cache.fill_(float("nan"))
    paged.kernel.store_kv(k, v, *paged.caches, torch.cat(paged.slots))
    paged.check(paged.attend())


def test_strided_lanes_are_handled_or_refused(kernel: KernelUnderTest) -> None:
    """An array whose last dimension is not contiguous is never read wrong."""
    paged = Paged(kernel, MIXED)
    right = paged.attend()
    paged.q = paged.q.mT.contiguous().mT  # the same numbers, but those of a head lie Hq apart
    k, v, slots = torch.cat(paged.k), torch.cat(paged.v), torch.cat(paged.slots)
    with suppress(InvalidValue):
        assert torch.equal(paged.attend(), right)
    with suppress(InvalidValue):
        paged.kernel.store_kv(k.mT.contiguous().mT, v, *paged.caches, slots)
    assert torch.equal(paged.kernel.gather(paged.caches[0], slots), k)


@pytest.mark.parametrize("block_size", [8, 16])
def test_offsets_beyond_32_bits(kernel: KernelUnderTest, block_size: int) -> None:
    """KNOWN_FAULTS B59: a request in blocks from 2^31 elements on, where 32-bit offsets are negative.

    The arrays are sparse: only the pages of these blocks are ever touched.
    """
    num_kv_heads, head_size = 2, 80
    first = 2**31 // (num_kv_heads * head_size * block_size)  # block 1677721 of 8
    meta = kernel.module.make_cache(first + 4, block_size, num_kv_heads, head_size, torch.bfloat16, "meta")
    if kernel.device == "cpu":
        caches = [sparse(cache) for cache in meta]
    else:
        caches = [torch.empty_like(cache, device=kernel.device) for cache in meta]
    paged = Paged(
        kernel, Case(((1, block_size + 5), (5, 5)), block_size, head_size, (8, 2), dtype=torch.bfloat16)
    )
    paged.caches = tuple(caches)
    own = [first + 1, first - 2], [first + 3, 0]
    paged.tables = torch.tensor(own, dtype=torch.int32, device=kernel.device)
    paged.slots = [
        torch.tensor(
            [table[p // block_size] * block_size + p % block_size for p in range(length)],
            device=kernel.device,
        )
        for table, length in zip(own, paged.context_lens, strict=True)
    ]
    paged.kernel.store_kv(torch.cat(paged.k), torch.cat(paged.v), *caches, torch.cat(paged.slots))
    assert torch.equal(paged.kernel.gather(caches[0], paged.slots[0]), paged.k[0])
    paged.check(paged.attend())


def sparse(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this layout in address space that takes no memory before it is written."""
    flags = {} if not hasattr(mmap, "MAP_NORESERVE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    if flags:
        flags["flags"] |= mmap.MAP_NORESERVE
    pages = mmap.mmap(-1, like.untyped_storage().nbytes(), **flags)
    flat = torch.frombuffer(pages, dtype=like.dtype)
    return flat.as_strided(like.shape, like.stride())


BAD_CALLS: dict[str, tuple[str, Callable[[Paged], dict[str, object]]]] = {
    "no scale": ("scale", lambda p: {"scale": 0.0}),
    "scores turned around": ("scale", lambda p: {"scale": -0.125}),
    "window of nothing": ("window", lambda p: {"window": 0}),
    "other head size": ("q", lambda p: {"q": p.q[..., :32].contiguous()}),
    "no multiple of the key heads": ("q", lambda p: {"q": p.q[:, :8].contiguous()}),
    "other dtype": ("q", lambda p: {"q": p.q.double()}),
    "64-bit lengths": ("seq_lens", lambda p: {"seq_lens": p.seq_lens.long()}),
    "query_start without its end": ("query_start", lambda p: {"query_start": p.query_start[:-1]}),
    "table of fewer sequences": ("block_tables", lambda p: {"block_tables": p.tables[:-1]}),
    "out of another shape": ("out", lambda p: {"out": p.q.new_empty(1, 9, 64)}),
    "lse of another shape": ("lse", lambda p: {"lse": p.q.new_empty(9, len(p.q)).T}),
    "lse of another dtype": ("lse", lambda p: {"lse": p.q.new_empty(len(p.q), 9).double()}),
}


@pytest.mark.parametrize(("field", "spoil"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments_are_named(
    kernel: KernelUnderTest, field: str, spoil: Callable[[Paged], dict[str, object]]
) -> None:
    """Arguments that do not fit together are refused before a pointer is made from them."""
    paged = Paged(kernel, MIXED)
    bad = spoil(paged)
    with pytest.raises(InvalidValue) as refusal:
        paged.attend(**bad)
    assert refusal.value.field.startswith(field)


def test_bad_stores_are_named(kernel: KernelUnderTest) -> None:
    """The same for the store, and for a block size that no shift divides by."""
    paged = Paged(kernel, MIXED)
    k, slots = torch.cat(paged.k), torch.cat(paged.slots)
    for field, arguments in {
        "k": (k[..., :32].contiguous(), k, *paged.caches, slots),
        "v": (k, k[1:], *paged.caches, slots),
        "slot_mapping": (k, k, *paged.caches, slots[1:]),
    }.items():
        with pytest.raises(InvalidValue) as refusal:
            kernel.module.store_kv(*arguments)
        assert refusal.value.field.startswith(field)
    with pytest.raises(InvalidValue, match="block_size: got 12"):
        kernel.module.make_cache(2, 12, 1, 64, torch.float32, kernel.device)


def test_empty_batch(kernel: KernelUnderTest) -> None:
    """No tokens, no work."""
    paged = Paged(kernel, MIXED)
    paged.kernel.store_kv(torch.cat(paged.k)[:0], torch.cat(paged.v)[:0], *paged.caches, paged.slots[0][:0])
    none = torch.zeros(0, dtype=torch.int32, device=kernel.device)
    start = torch.zeros(1, dtype=torch.int32, device=kernel.device)
    out = paged.kernel.paged_attention(paged.q[:0], *paged.caches, none.view(0, 0), start, none, 1.0)
    assert out.shape == (0, 9, 64)
