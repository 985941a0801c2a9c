"""Stage 3's batches: still static, but a pool of blocks decides who is let in and who is sent back."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run
from support.invariants import check_drained
from support.scripted import ScriptedModel
from support.watching import Watch


def engine_over(**options):
    """Stage 3 over a model that says 1 for ever."""
    return build("stage3_paged", ScriptedModel({}), **options)


@pytest.mark.parametrize(("blocks", "let_in"), [(8, 3), (9, 4), (7, 3), (6, 2), (2, 1)])
def test_let_in_by_the_blocks_of_the_prompt_and_one(blocks, let_in):
    """Each prompt fills two blocks of 4; whoever finds others there must leave one free."""
    engine = engine_over(kv_tokens=4 * blocks, max_num_seqs=8)
    for i in range(8):
        engine.add_request(ask(str(i), [9] * 8, max_tokens=1))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == [str(i) for i in range(let_in)]
    assert engine.stats.preemptions == 0


def test_a_batch_is_closed_until_it_is_over():
    """B ends first and its blocks are free at once, but C waits for A: that is what stage 4 will change."""
    engine = engine_over(max_num_seqs=2, kv_tokens=32)
    watch = Watch(engine)
    held = []
    for name, n in (("A", 4), ("B", 2), ("C", 2)):
        engine.add_request(ask(name, [9] * 4, max_tokens=n))
    while engine.has_unfinished():
        engine.step()
        held.append(engine.kv.usage().reserved)
    assert [f.parts for f in watch.forwards] == [
        [("A", 4), ("B", 4)], [("A", 1), ("B", 1)], [("A", 1)], [("A", 1)], [("C", 4)], [("C", 1)],
    ]  # fmt: skip
    assert held == [8, 8, 8, 0, 4, 0]
    check_drained(engine)


def test_the_preempted_goes_to_the_head_of_the_queue():
    """B and C are sent back, C first: then they come in their old order, and both before D, who came later."""
    engine = engine_over(kv_tokens=24, max_num_seqs=3)
    watch = Watch(engine)
    requests = [ask(name, [9] * 4, max_tokens=n) for name, n in (("A", 14), ("B", 14), ("C", 14), ("D", 2))]
    said = run(engine, requests)
    preempted = {name: outputs[-1].counters.preemptions for name, outputs in said.items()}
    assert preempted == {"A": 0, "B": 1, "C": 1, "D": 0}
    begun = [name for forward in watch.forwards for name, num_new in forward.parts if num_new > 1]
    assert begun == ["A", "B", "C", "B", "C", "D"]
    check_drained(engine)


def test_whoever_has_made_room_keeps_it():
    """One step, one block short: the youngest alone goes, and the others compute a token each in that step."""
    engine = engine_over(kv_tokens=20, max_num_seqs=3)
    watch = Watch(engine)
    for name, length in (("A", 4), ("B", 5), ("C", 3)):
        engine.add_request(ask(name, [9] * length, max_tokens=8))
    engine.step()
    assert [name for name, _ in watch.forwards[-1].parts] == ["A", "B", "C"]
    while not engine.stats.preemptions:
        engine.step()
    assert watch.forwards[-1].parts == [("A", 1), ("B", 1)]
    assert [seq.request_id for seq in engine.sequences()] == ["A", "B", "C"]
