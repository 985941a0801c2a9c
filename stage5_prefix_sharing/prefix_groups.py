"""Who begins with the same blocks as whom: from block tables to groups, without looking at a token.

Shared text lies in shared blocks, so sequences share a prefix where their tables begin with the same numbers.
Sorted by their tables, those who share are neighbours, and make a tree:

    table                    1 block        4 blocks
    3 7 1 4 | 9              a -----------+ a
    3 7 1 4 | 6              b            + b
    3 | 8 | 2                c
    3 | 5 | 0                d

n sequences that read m blocks together save (n - 1) m reads of a block, and nobody can be in two groups: all
four would save 3 reads, but a and b save 4, and c and d 1 more.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

Group = tuple[np.ndarray, int]
"""Who shares, `[n]`, and how many leading blocks."""


class Branch(NamedTuple):
    """A part of the tree: its sequences, the most reads they can save among themselves, and how."""

    members: list[int]
    saved: int
    groups: list[tuple[list[int], int]]


def find_groups(tables: np.ndarray, limits: np.ndarray, least: float) -> list[Group]:
    """Divide sequences into groups with common leading blocks, so that as many reads as possible are saved.

    Args:
        tables: `[B, max blocks]` block tables.
        limits: `[B]`, how many leading blocks of each may be shared; what follows them is not looked at.
        least: how many reads a group must save, at least 1.

    Returns:
        Groups of at least two, disjoint; sequences with nothing worth sharing are in none.
    """
    most = (len(tables) - 1) * limits.max(initial=0)
    if most < least:
        return []
    known = np.where(np.arange(tables.shape[1]) < limits[:, None], tables, -1)  # [B, max blocks]
    order = sorted(range(len(known)), key=lambda b: known[b].tobytes())
    known = known[order]
    same = (known[1:] == known[:-1]) & (known[1:] >= 0)  # [B - 1, max blocks]
    common = np.logical_and.accumulate(same, axis=1).sum(axis=1)  # [B - 1], blocks shared with the next one
    if (len(order) - 1) * common.max() < least:
        return []
    # The branches that are still growing, outermost first: how many blocks their parts share, and the parts.
    growing: list[tuple[int, list[Branch]]] = [(0, [])]
    for b, shared in zip(order, [0, *common.tolist()], strict=True):
        _close(growing, shared, least)
        growing.append((sys.maxsize, [Branch([b], 0, [])]))
    _close(growing, 0, least)
    return [(np.array(own), blocks) for own, blocks in _join(*growing[0], least).groups]


def _close(growing: list[tuple[int, list[Branch]]], shared: int, least: float) -> None:
    """End all branches whose parts share more than the next sequence does with the last one."""
    while growing[-1][0] > shared:
        branch = _join(*growing.pop(), least)
        if growing[-1][0] < shared:
            growing.append((shared, []))
        growing[-1][1].append(branch)


def _join(blocks: int, parts: list[Branch], least: float) -> Branch:
    """Of parts that all share so many blocks make one branch.

    A part joins the common group if that saves no less than what it can save by itself.
    """
    if len(parts) == 1:
        return parts[0]
    joining = [part for part in parts if len(part.members) * blocks >= part.saved]
    apart = [part for part in parts if len(part.members) * blocks < part.saved]
    together = [b for part in joining for b in part.members]
    saved, groups = (len(together) - 1) * blocks, [(together, blocks)]
    if saved < max(least, sum(part.saved for part in joining)):
        saved, groups, apart = 0, [], parts
    return Branch(
        members=[b for part in parts for b in part.members],
        saved=saved + sum(part.saved for part in apart),
        groups=groups + [group for part in apart for group in part.groups],
    )
