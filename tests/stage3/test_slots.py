"""Where each token of a paged sequence is written."""

from __future__ import annotations

import pytest
from support.engines import ask, build
from support.scripted import ScriptedModel
from support.watching import Watch


@pytest.mark.parametrize(
    ("length", "held"), [(3, [1, 1, 2, 2, 2, 2]), (4, [1, 2, 2, 2, 2, 3]), (5, [2, 2, 2, 2, 3, 3])]
)
def test_every_write_goes_to_its_block(length, held):
    """B02: blocks of 4, P = 3, 4, 5, 6 tokens: a block joins exactly when its first position is written.

    A neighbour takes blocks in between, so that no table is simply 0, 1, 2.
    """
    engine = build("stage3_paged", ScriptedModel({}), max_num_seqs=2)
    watch = Watch(engine)
    engine.add_request(ask("a", [9] * length, max_tokens=6))
    engine.add_request(ask("neighbour", [9] * 3, max_tokens=8))
    seq, _ = engine.sequences()
    slots, sizes, table = {}, [], []
    while not seq.finished:
        engine.step()
        computed = watch.forwards[-1].parts[0][1]
        slots |= dict(zip(watch.forwards[-1].positions[:computed], watch.forwards[-1].slots, strict=False))
        table = seq.block_table or table  # the end gives the blocks back
        sizes.append(len(table))
    positions = range(length + 5)  # the last token is never computed
    assert sorted(slots) == list(positions)
    assert table != sorted(range(table[0], table[0] + len(table)))
    assert [slots[p] for p in positions] == [table[p // 4] * 4 + p % 4 for p in positions]
    assert sizes == held
