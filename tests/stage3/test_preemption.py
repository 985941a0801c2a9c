"""A pool that runs dry in the middle of a static batch: the youngest is computed again, and nobody notices."""

from __future__ import annotations

from support.engines import build, run, tokens
from support.invariants import check_drained
from support.solo import crowd, solo_answers

from support.hf import tiny_pair  # isort: skip


def test_answers_survive_preemption():
    """B40, B41: prompt and answer are recomputed, the generator goes on where it was."""
    engine = build("stage3_paged", tiny_pair("llama")[1], kv_tokens=64, block_size=4, max_num_seqs=6)
    said = run(engine, crowd())
    assert engine.stats.preemptions > 0, "the pool was meant to be too small"
    assert {name: tokens(outputs) for name, outputs in said.items()} == solo_answers()
    check_drained(engine)
