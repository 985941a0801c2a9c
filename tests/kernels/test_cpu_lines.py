"""Blocks made of lines: ends of odd length, places of every number, processors without such products."""

from __future__ import annotations

import pytest
import torch
from paged_cases import Case, KernelUnderTest, Paged
from processors import another_processor
from support.interpreter import INTERPRETED

from common.model.tiled_linear import instructions
from stage3_paged.kernels import cpu

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this session is for Triton's interpreter")
DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

CPU = KernelUnderTest("cpu", cpu, "cpu")
MIXED = ((1, 1), (1, 16), (1, 17), (1, 32), (5, 39), (1, 700), (40, 40))


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [
        ((9, 3), 64, 16),
        ((2, 2), 64, 32),
        ((8, 2), 80, 16),
        ((8, 1), 128, 64),
        ((7, 1), 48, 16),
        ((64, 1), 32, 16),
    ],
    ids=str,
)
@each_dtype
def test_shapes(heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype) -> None:
    """Tiles of all heights and widths; blocks of one and of several times 16 tokens; free slots hold NaN."""
    paged = Paged(CPU, Case(MIXED, block_size, head_size, heads, dtype=dtype))
    lse = torch.empty(paged.q.shape[:2])
    paged.check(paged.attend(lse=lse), lse)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 15, 16, 17, 18])
@each_dtype
def test_ends_within_a_word(window: int | None, dtype: torch.dtype) -> None:
    """Contexts that end, and windows that begin, on either half of a word; its other half is NaN or another token's."""
    paged = Paged(CPU, Case(tuple((1, n) for n in range(1, 36)), window=window, dtype=dtype))
    paged.check(paged.attend())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("query", [1, 17, 33])  # by the kernel of decodes, by that of prompts
@each_dtype
def test_free_slots_change_no_bit(poison: float, query: int, dtype: torch.dtype) -> None:
    """KNOWN_FAULTS B62, in the other half of a word too."""
    lengths = (query + n for n in (0, 1, 14, 15, 16, 32))
    case = Case(tuple((query, n) for n in lengths), window=11, dtype=dtype)
    assert torch.equal(Paged(CPU, case, poison).attend(), Paged(CPU, case, 0.0).attend())


@each_dtype
def test_what_came_before_the_window_changes_no_bit(dtype: torch.dtype) -> None:
    """Even if it is NaN: a layer with a window never multiplies it."""
    case = Case(((1, 40), (1, 41)), window=8, dtype=dtype)
    paged = Paged(CPU, case)
    good = paged.attend()
    for slots, length in zip(paged.slots, paged.context_lens, strict=True):
        gone = slots[: length - 8]
        nan = torch.full((len(gone), 3, 64), float("nan"), dtype=dtype)
        cpu.store_kv(nan, nan, *paged.caches, gone)
    assert torch.equal(paged.attend(), good)


@each_dtype
def test_one_position_gives_its_value(dtype: torch.dtype) -> None:
    """KNOWN_FAULTS B61: a lone weight is exactly 1, and its value comes out unrounded."""
    paged = Paged(CPU, Case(((1, 1), (1, 300)), dtype=dtype))
    assert torch.equal(paged.attend()[0], paged.v[0][0].repeat_interleave(3, dim=0))  # [Hq, D]


@each_dtype
def test_a_neighbour_changes_no_bit(dtype: torch.dtype) -> None:
    """A decode's result is the same alone and in a batch."""
    paged = Paged(CPU, Case(MIXED, dtype=dtype))
    together = paged.attend()
    alone = cpu.paged_attention(
        paged.q[9:10],
        *paged.caches,
        paged.tables[5:6],
        torch.tensor([0, 1], dtype=torch.int32),
        paged.seq_lens[5:6],
        64**-0.5,
    )
    assert torch.equal(alone, together[9:10])


@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (64, 48), (16, 24), (8, 64)])
@pytest.mark.parametrize("count", [5, 90])  # by one thread, by all
@each_dtype
def test_every_number_has_its_place(block_size: int, head_size: int, count: int, dtype: torch.dtype) -> None:
    """Numbers that are all different come back from their slots, in lines or not; no other slot is touched."""
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    caches = cpu.make_cache(12, block_size, 3, head_size, dtype, "cpu")
    for cache in caches:
        cache.fill_(-1.0)
    slots = torch.randperm(12 * block_size)
    own, others = slots[:count], slots[count:]
    k, v = torch.arange(2 * count * 3 * head_size).view(2, count, 3, head_size).to(bits).view(dtype)
    cpu.store_kv(k, v, *caches, own)
    for cache, written in zip(caches, (k, v), strict=True):
        assert torch.equal(cpu.gather(cache, own).view(bits), written.view(bits))
        assert (cpu.gather(cache, others) == -1.0).all()


@each_dtype
def test_lines_are_what_the_instruction_takes(dtype: torch.dtype) -> None:
    """Written down once: w dimensions of 16 tokens side by side in K, w tokens of 16 dimensions in V."""
    if dtype not in instructions():
        pytest.skip("this processor's blocks are plain")
    bits, w = (torch.int16, 2) if dtype == torch.bfloat16 else (torch.int32, 1)
    k_cache, v_cache = cpu.make_cache(1, 32, 1, 48, dtype, "cpu")
    numbers = torch.arange(32 * 48).view(32, 1, 48).to(bits).view(dtype)
    cpu.store_kv(numbers, numbers, k_cache, v_cache, torch.arange(32))
    k = k_cache.permute(0, 2, 3, 1).reshape(2, 48 // w, 16, w).view(bits)
    v = v_cache.permute(0, 2, 1, 3).reshape(3, 32 // w, 16, w).view(bits)
    token, dimension = 16 + 5, 2 * 7 + 1
    assert k[1, dimension // w, 5, dimension % w] == 48 * token + dimension
    token, dimension = 2 * 9 + 1, 32 + 3
    assert v[2, token // w, 3, token % w] == 48 * token + dimension


@each_dtype
def test_where_there_are_no_lines(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processors keep plain blocks, with the same results to rounding; nothing of it is remembered here."""
    case = Case(MIXED, dtype=dtype)
    own = Paged(CPU, case).attend()
    with another_processor(monkeypatch):
        paged = Paged(CPU, case)
        theirs = paged.attend()
        assert torch.equal(cpu.gather(paged.caches[1], paged.slots[5]), paged.v[5])
    paged.check(theirs)
    assert torch.equal(own, theirs) is (dtype not in instructions())
    assert torch.equal(Paged(CPU, case).attend(), own)
