"""A prefix that is read once for several sequences (stage 5), over each kernel, against dense attention."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DTYPES, Case, KernelUnderTest, Paged

from common.batch import ForwardBatch
from common.errors import InvalidValue
from stage5_prefix_sharing.shared_prefix import SharingRule, attend_shared, plan_sharing

Groups = tuple[tuple[tuple[int, ...], int], ...]
"""Who shares how many leading blocks."""

ALL = tuple((1, length) for length in (17, 20, 23, 25, 32))
MIXED = ((1, 21), (5, 15), (1, 35), (1, 17), (1, 1), (18, 18), (1, 25), (1, 17), (1, 25))
BATCHES: dict[str, tuple[tuple[tuple[int, int], ...], Groups]] = {
    "all share": (ALL, (((0, 1, 2, 3, 4), 2),)),
    "to the last own token": (((1, 17), (1, 17)), (((0, 1), 2),)),
    "all that there is": (((1, 16), (1, 16)), (((0, 1), 2),)),
    "two groups, loners, chunks": (MIXED, (((7, 0, 3), 2), ((2, 8, 6), 3))),
    "a group in a group": (ALL, (((0, 1, 2, 3, 4), 1), ((3, 4), 3))),
}
SCALE = 80**-0.5


def lay_out(
    kernel: KernelUnderTest, name: str, heads: tuple[int, int] = (8, 2), dtype: torch.dtype = torch.float32
) -> Paged:
    """One of BATCHES, in blocks of 8; few shapes, as the CPU kernel is compiled for each."""
    sequences, groups = BATCHES[name]
    paged = Paged(kernel, Case(sequences, 8, 80, heads, dtype=dtype))
    share(paged, groups)
    return paged


def share(paged: Paged, groups: Groups) -> None:
    """Let sequences begin with the blocks of the first of their group; what was theirs there is poisoned."""
    size = paged.case.block_size
    for (leader, *others), count in groups:
        for b in others:
            old, new = paged.tables[b, :count], paged.tables[leader, :count]
            for cache in paged.caches:
                cache[old[old != new].long()] = float("nan")
            paged.tables[b, :count] = new
            for own in (paged.k, paged.v):
                own[b][: count * size] = own[leader][: count * size]


def batch_of(paged: Paged) -> ForwardBatch:
    """What the cache gets to see of it, on the host."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        query_start=paged.query_start.cpu(),
        seq_lens=paged.seq_lens.cpu(),
        logits_rows=nothing,
        query_lens=paged.query_lens,
        context_lens=paged.context_lens,
        slot_mapping=nothing,
        block_tables=paged.tables.cpu(),
    )


def rule(paged: Paged, tile: int, least: float = 1) -> SharingRule:
    """Share whenever possible, with tiles of this size."""
    heads, kv_heads = paged.case.heads
    return SharingRule(heads, kv_heads, paged.case.block_size, tile, least, torch.device(paged.device))


def check(paged: Paged, tile: int) -> None:
    """Attend by a plan that shares whatever can be shared."""
    plan = plan_sharing(batch_of(paged), rule(paged, tile))
    assert plan is not None
    assert sorted([*plan.rows.tolist(), *plan.rest_rows.tolist()]) == list(range(len(paged.q)))
    paged.check(attend_shared(paged.kernel, paged.q, paged.caches, plan, SCALE))


@pytest.mark.parametrize("tile", [1, 2, 8])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_dense_attention(kernel: KernelUnderTest, dtype: torch.dtype, name: str, tile: int) -> None:
    """Groups, loners and chunks in one batch; tiles that a group fills, overfills and does not fill."""
    check(lay_out(kernel, name, dtype=dtype), tile)


@pytest.mark.parametrize(("tile", "heads"), [(3, (9, 3)), (4, (2, 2)), (8, (8, 1))])
def test_heads(kernel: KernelUnderTest, tile: int, heads: tuple[int, int]) -> None:
    """However many heads share a key head, each finds its own way through a tile and back."""
    check(lay_out(kernel, "two groups, loners, chunks", heads), tile)


def test_float64(kernel: KernelUnderTest) -> None:
    """What exact tokens rest upon: not more than the last digits differ."""
    if kernel.name == "triton":
        with pytest.raises(InvalidValue, match=r"dtype: got torch\.float64"):
            lay_out(kernel, "all share", dtype=torch.float64)
        return
    check(lay_out(kernel, "two groups, loners, chunks", dtype=torch.float64), 8)


def test_strided_rows(kernel: KernelUnderTest) -> None:
    """A view into one fused projection."""
    paged = lay_out(kernel, "two groups, loners, chunks")
    paged.q = torch.cat([paged.q, paged.q.new_full((len(paged.q), 4, 80), float("nan"))], dim=1)[:, :8]
    check(paged, 2)


@pytest.mark.parametrize("shift", [-80.0, 80.0])
def test_one_part_outweighs_the_other(kernel: KernelUnderTest, shift: float) -> None:
    """Scores so far apart that the sums of one part are nothing beside the other's, or would overflow."""
    paged = lay_out(kernel, "to the last own token", (2, 2))
    paged.q[1] = paged.q[0]
    along = paged.q[0] / paged.q[0].square().sum(dim=-1, keepdim=True)  # [Hq, D]
    paged.k[0][:16] += shift / SCALE * along
    paged.k[1][:16] = paged.k[0][:16]
    paged.kernel.store_kv(paged.k[0], paged.v[0], *paged.caches, paged.slots[0])
    check(paged, 4)


def test_prefix_is_read_once(kernel: KernelUnderTest) -> None:
    """Eight sequences in one tile: the kernel gets each shared block once, and no suffix again."""
    sequences = tuple((1, 200 + b) for b in range(8))
    paged = Paged(kernel, Case(sequences, head_size=32))
    share(paged, ((tuple(range(8)), 12),))
    plan = plan_sharing(batch_of(paged), rule(paged, 8))
    assert plan.prefix.context_lens == [12 * 16]
    assert plan.prefix.block_tables.tolist() == [paged.tables[0, :12].tolist()]
    assert sorted(plan.suffix.context_lens) == [8 + b for b in range(8)]
    assert sorted(plan.suffix.block_tables.tolist()) == sorted(paged.tables[:, 12:13].tolist())
    assert plan.rest is None


def test_rule_decides(kernel: KernelUnderTest) -> None:
    """Five sequences with two blocks save eight reads: shared for a limit of 8 and not for one of 9."""
    paged = lay_out(kernel, "all share")
    assert plan_sharing(batch_of(paged), rule(paged, 4, 8)) is not None
    assert plan_sharing(batch_of(paged), rule(paged, 4, 9)) is None
    assert plan_sharing(batch_of(paged), rule(paged, 4, float("inf"))) is None


def test_nothing_in_common(kernel: KernelUnderTest) -> None:
    """Each its own blocks, no decode at all, and one decode beside chunks: the plain way."""
    for sequences in (ALL, ((5, 40), (18, 40)), ((1, 40), (5, 40))):
        paged = Paged(kernel, Case(sequences))
        assert plan_sharing(batch_of(paged), rule(paged, 4)) is None
