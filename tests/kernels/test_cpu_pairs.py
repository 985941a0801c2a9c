"""Blocks of bfloat16 in pairs: ends of odd length, places of every number, processors without such products."""

from __future__ import annotations

import pytest
import torch
from paged_cases import Case, KernelUnderTest, Paged
from processors import another_processor
from support.interpreter import INTERPRETED

from common.model.tiled_linear import instructions
from stage3_paged.kernels import cpu

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this session is for Triton's interpreter")
needs_pairs = pytest.mark.skipif(
    torch.bfloat16 not in instructions(), reason="this processor multiplies no pairs"
)

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
def test_shapes(heads: tuple[int, int], head_size: int, block_size: int) -> None:
    """Tiles of all heights and widths; blocks of one and of several times 16 tokens; free slots hold NaN."""
    paged = Paged(CPU, Case(MIXED, block_size, head_size, heads, dtype=torch.bfloat16))
    lse = torch.empty(paged.q.shape[:2])
    paged.check(paged.attend(lse=lse), lse)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 15, 16, 17, 18])
def test_ends_within_a_word(window: int | None) -> None:
    """Contexts that end, and windows that begin, on either half of a word; its other half is NaN or another token's."""
    paged = Paged(CPU, Case(tuple((1, n) for n in range(1, 36)), window=window, dtype=torch.bfloat16))
    paged.check(paged.attend())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_free_slots_change_no_bit(poison: float) -> None:
    """KNOWN_FAULTS B62, in the other half of a word too."""
    case = Case(tuple((1, n) for n in (1, 2, 15, 16, 17, 33)), window=11, dtype=torch.bfloat16)
    assert torch.equal(Paged(CPU, case, poison).attend(), Paged(CPU, case, 0.0).attend())


def test_what_came_before_the_window_changes_no_bit() -> None:
    """Even if it is NaN: a layer with a window never multiplies it."""
    case = Case(((1, 40), (1, 41)), window=8, dtype=torch.bfloat16)
    paged = Paged(CPU, case)
    good = paged.attend()
    for slots, length in zip(paged.slots, paged.context_lens, strict=True):
        gone = slots[: length - 8]
        nan = torch.full((len(gone), 3, 64), float("nan"), dtype=torch.bfloat16)
        cpu.store_kv(nan, nan, *paged.caches, gone)
    assert torch.equal(paged.attend(), good)


def test_one_position_gives_its_value() -> None:
    """KNOWN_FAULTS B61: a lone weight is exactly 1, and its value comes out unrounded."""
    paged = Paged(CPU, Case(((1, 1), (1, 300)), dtype=torch.bfloat16))
    assert torch.equal(paged.attend()[0], paged.v[0][0].repeat_interleave(3, dim=0))  # [Hq, D]


def test_a_neighbour_changes_no_bit() -> None:
    """A decode's result is the same alone and in a batch."""
    paged = Paged(CPU, Case(MIXED, dtype=torch.bfloat16))
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
def test_every_number_has_its_place(block_size: int, head_size: int, count: int) -> None:
    """Numbers that are all different come back from their slots, in pairs or not; no other slot is touched."""
    caches = cpu.make_cache(12, block_size, 3, head_size, torch.bfloat16, "cpu")
    for cache in caches:
        cache.fill_(-1.0)
    slots = torch.randperm(12 * block_size)
    own, others = slots[:count], slots[count:]
    bits = torch.arange(2 * count * 3 * head_size).view(2, count, 3, head_size)
    k, v = bits.to(torch.int16).view(torch.bfloat16)
    cpu.store_kv(k, v, *caches, own)
    for cache, written in zip(caches, (k, v), strict=True):
        assert torch.equal(cpu.gather(cache, own).view(torch.int16), written.view(torch.int16))
        assert (cpu.gather(cache, others) == -1.0).all()


@needs_pairs
def test_lines_are_what_the_instruction_takes() -> None:
    """Written down once: two dimensions of 16 tokens side by side in K, two tokens of 16 dimensions in V."""
    k_cache, v_cache = cpu.make_cache(1, 32, 1, 48, torch.bfloat16, "cpu")
    numbers = torch.arange(32 * 48).view(32, 1, 48).to(torch.int16).view(torch.bfloat16)
    cpu.store_kv(numbers, numbers, k_cache, v_cache, torch.arange(32))
    k = k_cache.permute(0, 2, 3, 1).reshape(2, 24, 16, 2).view(torch.int16)
    v = v_cache.permute(0, 2, 1, 3).reshape(3, 16, 16, 2).view(torch.int16)
    token, dimension = 16 + 5, 2 * 7 + 1
    assert k[1, 7, 5, 1] == 48 * token + dimension
    token, dimension = 2 * 9 + 1, 32 + 3
    assert v[2, 9, 3, 1] == 48 * token + dimension


def test_where_no_pairs_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processors keep plain blocks, with the same results to rounding; nothing of it is remembered here."""
    case = Case(MIXED, dtype=torch.bfloat16)
    own = Paged(CPU, case).attend()
    with another_processor(monkeypatch):
        paged = Paged(CPU, case)
        theirs = paged.attend()
        assert torch.equal(cpu.gather(paged.caches[1], paged.slots[5]), paged.v[5])
    paged.check(theirs)
    assert torch.equal(own, theirs) is (torch.bfloat16 not in instructions())
    assert torch.equal(Paged(CPU, case).attend(), own)
