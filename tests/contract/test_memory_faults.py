"""Public faults of KV bookkeeping, each with its own small input, on every stage."""

from __future__ import annotations

import pytest
from support.engines import answers, ask, build, run, tokens
from support.invariants import check_drained, check_memory
from support.scripted import ScriptedModel, scripted_config
from support.watching import Watch

from common.errors import InvalidValue
from common.protocol import FinishReason

SCRIPTS = {m: (8, list(range(m + 5, m + 45))) for m in (3, 4, 5)}


def prompt(marker: int, length: int = 8) -> list[int]:
    """The marker and filler."""
    return [marker] + [60] * (length - 1)


def test_a_lone_request_of_whole_blocks(stage):
    """B04: P = 8 in blocks of 4, a batch of 1, ends after as many forwards as tokens; three say the same."""
    engine = build(stage, ScriptedModel(SCRIPTS), max_num_seqs=1)
    assert answers(engine, [ask("a", prompt(3))]) == {"a": SCRIPTS[3][1][:8]}
    assert engine.stats.forwards == 8
    three = build(stage, ScriptedModel(SCRIPTS), max_num_seqs=3)
    said = answers(three, [ask(name, prompt(3)) for name in "abc"])
    assert said == dict.fromkeys("abc", SCRIPTS[3][1][:8])


@pytest.mark.parametrize("ending_first", [True, False])
@pytest.mark.parametrize("max_tokens", [5, 6, 7])
def test_one_ends_while_the_other_needs_a_block(stage, ending_first, max_tokens):
    """B07: in the step before, in the very step, or in the one after; who has ended is never a victim.

    4 blocks of 4.  A has 3 + 6 tokens (or one less, or more), B writes position 8 in forward 6 and finds
    the pool empty while A lives.
    """
    scripts = {3: (3, list(range(20, 40))), 4: (4, list(range(30, 50)))}
    engine = build(stage, ScriptedModel(scripts), kv_tokens=16, max_num_seqs=2, watermark=0.0)
    requests = [ask("A", prompt(3, 3), max_tokens=max_tokens), ask("B", prompt(4, 4), max_tokens=9)]
    for request in requests if ending_first else requests[::-1]:
        engine.add_request(request)
    said: dict[str, list] = {"A": [], "B": []}
    while engine.has_unfinished():
        for output in engine.step():
            said[output.request_id].append(output)
        check_memory(engine)
    assert tokens(said["A"]) == scripts[3][1][:max_tokens]
    assert tokens(said["B"]) == scripts[4][1][:9]
    assert [sum(o.finish_reason is not None for o in outputs) for outputs in said.values()] == [1, 1]
    if engine.capabilities.preempts:
        assert engine.stats.preemptions == (0 if max_tokens == 5 else 1)
    check_drained(engine)


def test_no_slot_is_lost_or_won_in_two_hundred_tokens(stage):
    """B08: blocks of 1, one short prompt, max_tokens 200: at idle all is free, once."""
    engine = build(stage, ScriptedModel({}), block_size=1, kv_tokens=256, max_model_len=256)
    said = run(engine, [ask("a", [9, 60], max_tokens=200)])["a"]
    assert len(tokens(said)) == 200
    check_drained(engine)


def test_abort_while_waiting_for_a_full_pool(stage):
    """B10: B never had memory; its abort, a second one and one of an unknown id disturb nobody."""
    engine = build(stage, ScriptedModel(SCRIPTS), kv_tokens=16, max_num_seqs=4)
    engine.add_request(ask("A", prompt(3), max_tokens=8))
    said = engine.step()
    engine.add_request(ask("B", prompt(4, 12), max_tokens=4))
    engine.add_request(ask("C", prompt(5), max_tokens=8))
    said += engine.step()
    assert not {output.request_id for output in said} & {"B", "C"}
    [last] = engine.abort("B")
    assert (last.finish_reason, last.counters.forwards) == (FinishReason.ABORT, 0)
    assert engine.abort("B") == engine.abort("unknown") == []
    assert [seq.request_id for seq in engine.sequences()] == ["A", "C"]
    check_memory(engine)
    later = run(engine, [])
    assert tokens([*said, *later["A"]]) == SCRIPTS[3][1][:8]
    assert tokens(later["C"]) == SCRIPTS[5][1][:8]
    check_drained(engine)


def test_what_can_never_fit_and_what_outgrows_the_pool(stage):
    """B46: 8 blocks of 16.  P = 200 is refused and P = 5 runs; P = 100 with 100 to come ends in some way."""
    model = ScriptedModel({}, scripted_config(max_position_embeddings=1024))
    engine = build(
        stage, model, kv_tokens=128, block_size=16, max_model_len=1024, max_num_batched_tokens=1024
    )
    if not engine.capabilities.remembers_kv:
        pytest.skip("this stage keeps nothing that could run out")
    with pytest.raises(InvalidValue, match="kv_bytes"):
        engine.add_request(ask("big", prompt(9, 200), max_tokens=4))
    assert answers(engine, [ask("small", prompt(9, 5), max_tokens=4)]) == {"small": [1] * 4}
    grows = ask("grows", prompt(9, 100), max_tokens=100)
    if not engine.capabilities.paged:  # it would have to be reserved in full
        with pytest.raises(InvalidValue, match="asks for 200 tokens"):
            engine.add_request(grows)
        return
    said = run(engine, [grows])["grows"]
    assert len(tokens(said)) == 29, "128 slots, and the last token of an answer needs none"
    assert said[-1].finish_reason == FinishReason.LENGTH
    assert engine.stats.preemptions == 0
    check_drained(engine)


def test_children_that_fit_only_one_by_one(stage):
    """B47: n = 4, P = 8, max_tokens 40, 12 blocks of 4: room for one child at full length; all four finish."""
    scripts = {9: (8, list(range(12, 52)))}
    engine = build(stage, ScriptedModel(scripts), kv_tokens=48, max_num_seqs=4)
    said = run(engine, [ask("a", prompt(9), n=4, max_tokens=40)])["a"]
    assert [tokens(said, index) for index in range(4)] == [scripts[9][1]] * 4
    check_drained(engine)


def test_first_come_first_served(stage):
    """B49: whoever came first is computed first, also where a later one would have fitted into the room."""
    engine = build(stage, ScriptedModel({}), kv_tokens=32, max_num_seqs=4)
    watch = Watch(engine)
    sizes = [(18, 3), (15, 2), (2, 1), (2, 1), (30, 2), (1, 1), (9, 8), (2, 2)]
    requests = [ask(str(i), prompt(9, length), max_tokens=n) for i, (length, n) in enumerate(sizes)]
    got = answers(engine, requests)
    assert watch.order == [request.request_id for request in requests]
    assert {name: len(answer) for name, answer in got.items()} == {
        request.request_id: request.params.max_tokens for request in requests
    }


@pytest.mark.parametrize(("budget", "seats"), [(24, 8), (31, 3), (64, 2)])
def test_no_forward_is_larger_than_allowed(stage, budget, seats):
    """Never more tokens than `max_num_batched_tokens` nor more sequences than `max_num_seqs`, and often as many."""
    engine = build(
        stage, ScriptedModel({}), max_model_len=24, max_num_batched_tokens=budget, max_num_seqs=seats
    )
    watch = Watch(engine)
    run(engine, [ask(str(i), prompt(9, 1 + (5 * i) % 16), max_tokens=1 + i % 7) for i in range(24)])
    most_tokens = max(sum(n for _, n in forward.parts) for forward in watch.forwards)
    most_seqs = max(len(forward.parts) for forward in watch.forwards)
    assert most_tokens <= budget
    assert most_seqs <= (seats if engine.capabilities.batches else 1)
    if engine.capabilities.batches:
        assert most_tokens == budget or most_seqs == seats
