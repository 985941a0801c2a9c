"""Stage 2's batches: in together, out together, memory kept to the end, and what that wastes."""

from __future__ import annotations

import pytest
from support.engines import answers, ask, build, run
from support.hf import tiny_pair
from support.invariants import check_drained
from support.scripted import EOS, ScriptedModel
from support.solo import crowd, solo_answers
from support.watching import Watch

from common.bench.memory import Split, split_steps
from common.bench.record import Recorder
from common.errors import InvalidValue

SCRIPTS = {m: (4, list(range(m + 10, m + 40))) for m in (3, 4, 5)} | {6: (4, [20, 21, EOS])}


def prompt(marker: int) -> list[int]:
    """Four tokens, the first of them the marker."""
    return [marker, 50, 51, 52]


def engine_over(**options):
    """Stage 2 over the scripted model."""
    return build("stage2_kvcache", ScriptedModel(SCRIPTS), **options)


def test_in_together_and_out_together():
    """C waits until A and B are both done, though B's place is idle from step 3 on."""
    engine = engine_over(max_num_seqs=2)
    watch = Watch(engine)
    run(
        engine,
        [
            ask("A", prompt(3), max_tokens=4),
            ask("B", prompt(4), max_tokens=2),
            ask("C", prompt(5), max_tokens=2),
        ],
    )
    assert [f.parts for f in watch.forwards] == [
        [("A", 4), ("B", 4)], [("A", 1), ("B", 1)], [("A", 1)], [("A", 1)], [("C", 4)], [("C", 1)],
    ]  # fmt: skip
    assert (engine.stats.slot_steps, engine.stats.idle_slot_steps) == (12, 4)


def test_memory_of_a_finished_member_stays_until_the_batch_ends():
    """Reserved as before, step by step; then all is free at once and the next batch is in."""
    engine = engine_over(max_num_seqs=2)
    for name, marker, n in (("A", 3, 4), ("B", 4, 2), ("C", 5, 2)):
        engine.add_request(ask(name, prompt(marker), max_tokens=n))
    held = []
    while engine.has_unfinished():
        engine.step()
        held.append({span.request_id: (span.start, span.reserved) for span in engine.kv.spans()})
    both = {"A": (0, 8), "B": (8, 6)}
    assert held == [both, both, both, {}, {"C": (0, 6)}, {}]
    check_drained(engine)


def test_memory_of_an_aborted_member_stays_too():
    """It is a member that ended early; when it was the last one, the batch is over."""
    engine = engine_over(max_num_seqs=2)
    for name, marker in (("A", 3), ("B", 4), ("C", 5)):
        engine.add_request(ask(name, prompt(marker), max_tokens=3))
    engine.step()
    engine.abort("B")
    assert [span.request_id for span in engine.kv.spans()] == ["A", "B"]
    assert [seq.request_id for seq in engine.sequences()] == ["A", "C"]
    engine.abort("A")
    assert engine.kv.usage().reserved == 0
    assert [output.request_id for output in engine.step()] == ["C"]


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"max_num_seqs": 8, "kv_tokens": 2048}, ["abcde"]),
        ({"max_num_seqs": 2, "kv_tokens": 2048}, ["ab", "cd", "e"]),
        # 4 + 8 slots each, or 4 + 20 for c: d would fit behind a and b
        ({"max_num_seqs": 8, "kv_tokens": 36}, ["ab", "cd", "e"]),
        # at most two prompts of 4 in one forward
        ({"max_num_seqs": 8, "max_num_batched_tokens": 11, "max_model_len": 10}, ["ab", "cd", "e"]),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 12, "max_model_len": 10}, ["abc", "de"]),
    ],
)
def test_first_come_first_served_under_every_limit(options, batches):
    """Places, slots and budget end a batch; nobody overtakes, though d would have fitted where c does not."""
    engine = engine_over(**options)
    watch = Watch(engine)
    sizes = {"a": 8, "b": 8, "c": 20, "d": 8, "e": 8}
    run(engine, [ask(name, prompt(3), max_tokens=n) for name, n in sizes.items()])
    begun = ["".join(name for name, num_new in f.parts if num_new == 4) for f in watch.forwards]
    assert [names for names in begun if names] == batches


@pytest.mark.parametrize(("reservation", "fit"), [("max_tokens", 4), ("max_model_len", 1)])
def test_reservation_decides_how_many_are_in(reservation, fit):
    """64 slots: four requests of 4 + 12, or one context of 40."""
    engine = engine_over(kv_tokens=64, max_model_len=40, max_num_seqs=8, reservation=reservation)
    watch = Watch(engine)
    run(engine, [ask(str(i), prompt(3), max_tokens=12) for i in range(8)])
    assert len(watch.forwards[0].parts) == fit


@pytest.mark.parametrize("reservation", ["max_tokens", "max_model_len"])
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3-tied-biases"])
def test_equal_to_stage_1(reservation, variant):
    """Greedy and seeded, batches full and not, a slab of a few contexts."""
    model = tiny_pair(variant)[1]
    engine = build(
        "stage2_kvcache", model, reservation=reservation, kv_tokens=100, max_model_len=40, max_num_seqs=3
    )
    assert answers(engine, crowd()) == solo_answers(variant)
    check_drained(engine)


def test_each_token_is_computed_once():
    """The cost is p + n - 1 instead of n * p + n * (n - 1) / 2: the last token is never computed."""
    engine = engine_over()
    run(engine, [ask("a", prompt(3), max_tokens=9)])
    assert engine.stats.tokens_computed == 4 + 9 - 1
    assert [sum(lengths) for lengths in engine.model.forwards] == [4] + [1] * 8


def test_waste_as_the_paper_splits_it():
    """By hand, slot by slot.  20 slots, A: 4 + 4, B: 4 + 8 but ends itself after three tokens; C waits.

    During a forward its tokens count as stored.  A stores 7 of its 8 slots in the end, B 6 of its 12; all
    the rest of what they hold is internal, and after its end so is all that B holds.  The slab is full, so
    nothing is external.
    """
    engine = engine_over(kv_tokens=20, max_num_seqs=4)
    run_ = Recorder(engine).run(
        [
            ask("A", prompt(3), max_tokens=4),
            ask("B", prompt(6), max_tokens=8),
            ask("C", prompt(4), max_tokens=3),
        ]
    )
    splits = list(split_steps(run_).values())
    assert splits[:4] == [
        Split(token_states=4 + 4, reservation=3 + 2, internal=1 + 6, external=0, rest=0),
        Split(token_states=5 + 5, reservation=2 + 1, internal=1 + 6, external=0, rest=0),
        Split(token_states=6 + 6, reservation=1 + 0, internal=1 + 6, external=0, rest=0),
        Split(token_states=7, reservation=0, internal=1 + 12, external=0, rest=0),
    ]
    # C alone: 4 + 3 slots of 20, nobody waits any more
    assert splits[4] == Split(token_states=4, reservation=2, internal=1, external=0, rest=13)


def test_a_gap_that_does_not_fit_the_next_one_is_external():
    """12 of 20 slots are held; the head of the queue wants 12 and finds 8."""
    engine = engine_over(kv_tokens=20, max_num_seqs=4)
    run_ = Recorder(engine).run([ask(name, prompt(3), max_tokens=8) for name in "AB"])
    first, *_ = split_steps(run_).values()
    assert first == Split(token_states=4, reservation=7, internal=1, external=8, rest=0)


def test_what_can_never_fit_is_refused_and_the_next_one_served():
    """B46: with the numbers, and without a trace."""
    engine = engine_over(kv_tokens=20)
    with pytest.raises(InvalidValue, match=r"kv_bytes: .* asks for 24 tokens x 128 bytes, and 20 tokens fit"):
        engine.add_request(ask("a", prompt(3), max_tokens=20))
    assert (engine.live, engine.stats.requests_added) == ({}, 0)
    assert answers(engine, [ask("b", prompt(3), max_tokens=2)]) == {"b": [13, 14]}
