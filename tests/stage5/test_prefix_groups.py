"""Which sequences are grouped by their tables: against every way there is to group them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage5_prefix_sharing.prefix_groups import find_groups

Rows = list[tuple[list[int], int]]
"""Of each sequence its table and how many leading blocks of it may be shared."""


def found(rows: Rows, least: float = 1) -> dict[frozenset[int], int]:
    """Groups and how many blocks they share; behind each table stands what stands there in a batch, zeros."""
    width = max((len(table) for table, _ in rows), default=0)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for line, (table, _) in zip(tables, rows, strict=True):
        line[: len(table)] = table
    limits = np.array([limit for _, limit in rows], dtype=np.int64)
    return {frozenset(own.tolist()): blocks for own, blocks in find_groups(tables, limits, least)}


def shared(rows: Rows, members: frozenset[int]) -> int:
    """Leading blocks that all of them have in common and may share."""
    open_parts = [rows[b][0][: rows[b][1]] for b in members]
    count = 0
    for column in zip(*open_parts, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def partitions(items: list[int]) -> Iterator[list[frozenset[int]]]:
    """Every way to divide them."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [frozenset([first]), *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], part | {first}, *parts[i + 1 :]]


blocks = st.integers(0, 2)
row = st.lists(blocks, min_size=1, max_size=5).flatmap(
    lambda table: st.tuples(st.just(table), st.integers(0, len(table)))
)


@given(st.lists(row, max_size=6))
def test_no_other_way_saves_more(rows: Rows) -> None:
    """Groups are disjoint, share what they say, and save as many reads as any division of the sequences."""
    groups = found(rows)
    assert sum(len(members) for members in groups) == len(frozenset().union(*groups))
    for members, count in groups.items():
        assert len(members) > 1
        assert count == shared(rows, members) > 0
    best = max(
        sum((len(part) - 1) * shared(rows, part) for part in parts)
        for parts in partitions(list(range(len(rows))))
    )
    assert sum((len(members) - 1) * count for members, count in groups.items()) == best


@given(st.lists(row, max_size=12), st.integers(2, 12))
def test_small_savings_are_left(rows: Rows, least: int) -> None:
    """A group that saves fewer reads than `least` is not one; a large one is found whatever the limit is."""
    groups = found(rows, least)
    for members, count in groups.items():
        assert (len(members) - 1) * count >= least
        assert count == shared(rows, members)
    everyone = frozenset(range(len(rows)))
    if len(rows) > 1 and (len(rows) - 1) * shared(rows, everyone) >= least:
        assert groups


LONG = list(range(100, 160))


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        ([], {}),
        ([([5, 6], 2)], {}),
        ([([5, 6], 0), ([5, 6], 0)], {}),
        ([([5, 6, 1], 3), ([5, 6, 2], 3), ([5, 6, 3], 3)], {frozenset([0, 1, 2]): 2}),
        # Two kinds of agents whose chat template begins with the same block.
        (
            [([1, *LONG, b], 61) for b in (2, 3)] + [([1, *LONG[::-1], b], 61) for b in (2, 3)],
            {frozenset([0, 1]): 61, frozenset([2, 3]): 61},
        ),
        # Two samples of one long prompt among others that share its beginning.
        (
            [([1, 2, 9], 3), ([1, 2, *LONG], 62), ([1, 2, *LONG], 62), ([1, 2, 0], 3), ([1, 2, 200], 3)],
            {frozenset([1, 2]): 62, frozenset([0, 3, 4]): 2},
        ),
        # One who may share less stands between two by its numbers, but is not in their way.
        ([([1, 2, 3, 4], 4), ([1, 2, 3, 5], 1), ([1, 2, 3, 6], 4)], {frozenset([0, 2]): 3}),
    ],
)
def test_examples(rows: Rows, groups: dict[frozenset[int], int]) -> None:
    """Cases that a simpler rule gets wrong."""
    assert found(rows) == groups
