"""What the CPU kernel refuses before it goes to an address: layouts are remembered, numbers never."""

from __future__ import annotations

import pytest
import torch
from paged_cases import Case, KernelUnderTest, Paged
from support.interpreter import INTERPRETED

from common.errors import InvalidValue
from stage3_paged.kernels import cpu

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this session is for Triton's interpreter")

CPU = KernelUnderTest("cpu", cpu, "cpu")
BATCH = ((1, 17), (3, 40), (20, 33))
"""A decode, a chunk and a prompt, of 2, 3 and 3 blocks; with three free ones the cache has 11."""


@pytest.mark.parametrize(("row", "column", "block"), [(0, 1, 11), (1, 0, -1), (2, 2, 2**30)])
def test_a_block_outside_is_refused_after_a_good_call(row: int, column: int, block: int) -> None:
    """The table is the same tensor as in the call before, which was right; and so is a third call."""
    paged = Paged(CPU, Case(BATCH))
    good, before = paged.attend(), int(paged.tables[row, column])
    paged.tables[row, column] = block
    with pytest.raises(InvalidValue, match=rf"block_tables\[{row}\].*allowed: 0 to 10"):
        paged.attend()
    paged.tables[row, column] = before
    assert torch.equal(paged.attend(), good)


def test_a_context_longer_than_its_table_is_refused() -> None:
    """The length is the same tensor as before; what the host believes makes no difference."""
    paged = Paged(CPU, Case(BATCH))
    paged.attend()
    paged.seq_lens[1] = paged.tables.shape[1] * 16 + 1
    with pytest.raises(InvalidValue, match=r"block_tables\[1\]"):
        paged.attend()


@pytest.mark.parametrize("count", [3, 80])  # by one thread, by all
@pytest.mark.parametrize("slot", [11 * 16, -1])
def test_a_slot_outside_is_refused_after_a_good_call(slot: int, count: int) -> None:
    """Nothing is written then, not even the tokens before it."""
    caches = cpu.make_cache(11, 16, 2, 32, torch.float32, "cpu")
    k, slots = torch.randn(count, 2, 32), torch.arange(count)
    cpu.store_kv(k, k, *caches, slots)
    slots[-1] = slot
    with pytest.raises(InvalidValue, match=rf"slot_mapping: got {slot}, allowed: 0 to 175"):
        cpu.store_kv(k + 1, k + 1, *caches, slots)
    assert torch.equal(cpu.gather(caches[0], torch.arange(count)), k)


def test_layouts_that_differ_in_one_thing_are_told_apart() -> None:
    """A good call, then the same with one array of another dtype, of other strides, or K where V belongs."""
    paged = Paged(CPU, Case(BATCH))
    good = paged.attend()
    k_cache, v_cache = paged.caches
    apart = torch.stack((paged.q, paged.q), dim=3)[..., 0]  # [T, Hq, D], the same numbers two places apart
    for changed in (
        {"q": paged.q.bfloat16()},
        {"q": apart},
        {"k_cache": v_cache},
        {"v_cache": k_cache},
        {"k_cache": k_cache.bfloat16()},
        {"k_cache": k_cache.contiguous()},
        {"seq_lens": paged.seq_lens.long()},
    ):
        with pytest.raises(InvalidValue):
            paged.attend(**changed)
    out = torch.empty(len(paged.q), 9, 128)[..., :64]  # rows that lie apart
    assert torch.equal(paged.attend(out=out), good)
    wide = torch.nn.functional.pad(paged.tables, (0, 3))[:, :-3]  # tables whose rows lie apart
    assert torch.equal(paged.attend(block_tables=wide), good)
