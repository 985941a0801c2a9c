"""The picture of block tables is what a real pool looked like."""

from __future__ import annotations

import pytest
import torch
from support.scripted import scripted_config

from common.bench.block_picture import BLOCK_SIZE, NUM_BLOCKS, REQUESTS, blocks_picture, stop_in_the_middle


@pytest.mark.parametrize("paged", ["stage3_paged", "stage4_continuous"])
def test_tables_are_those_of_a_run(paged):
    """Disjoint blocks, just as many as the tokens need, and somebody has taken over what was given back."""
    found = stop_in_the_middle(paged, scripted_config(), torch.float32)
    held = [block for table in found.tables.values() for block in table]
    assert set(found.tables) == {"B", "C", "E"} < set(REQUESTS)
    assert len(set(held)) == len(held)
    assert all(0 <= block < NUM_BLOCKS for block in held)
    assert all(len(table) == -(-found.lengths[name] // BLOCK_SIZE) for name, table in found.tables.items())
    assert any(table != sorted(table) for table in found.tables.values()), "blocks were meant to be scattered"
    picture = blocks_picture(paged, found)
    assert all(f"{name} holds {found.lengths[name]} tokens" in picture.alt for name in found.tables)
