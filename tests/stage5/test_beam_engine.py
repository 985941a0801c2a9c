"""Beams among other requests, in little memory, taken back; what they cost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.beams import beam_request, hf_beams, resubmit, scored, with_eos
from support.engines import ask, build, run, tokens
from support.hf import tiny_pair
from support.hf_oracle import random_prompts
from support.invariants import check_drained, check_memory, poison_free_memory
from support.solo import crowd, solo_answers

from common.beam_params import BeamSearchParams
from common.errors import InvalidValue
from common.generate import drive
from common.protocol import FinishReason
from stage5_prefix_sharing.beam_resubmit import ResubmittedBeams

STAGE = "stage5_prefix_sharing"
EOS = (11, 40)
PROMPTS = random_prompts([6, 13, 2], seed=7)
PARAMS = [
    BeamSearchParams(4, n=4, max_tokens=10, early_stopping="never"),
    BeamSearchParams(3, n=2, max_tokens=7, length_penalty=-1.0),
    BeamSearchParams(8, n=8, max_tokens=9, early_stopping=True),
]


def engine_over(**options):
    """Stage 5 over a tiny random model."""
    return build(STAGE, with_eos(tiny_pair("llama")[1], EOS), **options)


def searches() -> list:
    """Three beam searches of different kinds."""
    return [
        beam_request(f"beam {i}", prompt, params)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


def assert_right(said: dict) -> None:
    """The beam searches' answers are transformers'."""
    hf = tiny_pair("llama")[0]
    for request in searches():
        [want] = hf_beams(hf, [request.prompt_token_ids], request.beam, EOS)
        got = scored(said[request.request_id], request.beam)
        assert [answer for answer, _ in got] == [answer for answer, _ in want]
        assert [score for _, score in got] == pytest.approx([score for _, score in want], rel=2e-6)


def watched(engine, requests) -> dict:
    """Run to the end with every invariant checked after each step, and free memory poisoned."""
    said: dict = {}
    for step, outputs in enumerate(drive(engine, requests)):
        assert step < 2000, "it goes round in circles"
        check_memory(engine)
        poison_free_memory(engine)
        for output in outputs:
            said.setdefault(output.request_id, []).append(output)
    check_drained(engine)
    return said


@pytest.mark.parametrize("through", [watched, resubmit])
@pytest.mark.parametrize("budget", [6, 32, 1024])
def test_among_ordinary_requests(through, budget):
    """Greedy and seeded requests and three searches share each forward; each answers as if alone."""
    engine = engine_over(max_num_seqs=6, max_num_batched_tokens=budget)
    mixed = [request for pair in zip(crowd(), searches(), strict=False) for request in pair] + crowd()[3:]
    said = through(engine, mixed)
    assert {r.request_id: tokens(said[r.request_id]) for r in crowd()} == solo_answers()
    assert_right(said)
    assert engine.live == {}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("kv_tokens", "block_size", "seats"), [(24, 2, 16), (24, 4, 3), (40, 8, 2), (24, 1, 1), (64, 4, 8)]
)
def test_in_little_memory(kv_tokens, block_size, seats, caching):
    """As little as one beam at a time: beams lose their blocks and their search goes on."""
    engine = engine_over(
        kv_tokens=kv_tokens, block_size=block_size, max_num_seqs=seats, max_num_batched_tokens=32,
        watermark=0.0, enable_prefix_caching=caching,
    )  # fmt: skip
    small = [r for r in crowd() if len(r.prompt_token_ids) + r.params.max_tokens <= kv_tokens]
    said = watched(engine, [*searches(), *small])
    assert engine.stats.preemptions > 0, "the pool was meant to be too small"
    assert_right(said)
    alone = solo_answers()
    assert all(tokens(said[r.request_id]) == alone[r.request_id] for r in small)


def test_resubmitting_in_little_memory():
    """The other way through the same needle's eye."""
    engine = engine_over(kv_tokens=40, max_num_seqs=3, max_num_batched_tokens=16, watermark=0.0)
    said = resubmit(engine, [*searches(), *crowd()])
    assert engine.stats.preemptions > 0, "the pool was meant to be too small"
    assert_right(said)
    check_drained(engine)


@pytest.mark.parametrize("seed", range(6))
def test_arrivals_priorities_and_aborts_at_random(seed):
    """Whatever comes, goes or is more urgent, what is left answers as if alone."""
    rng = random.Random(seed)
    engine = engine_over(
        kv_tokens=rng.choice([32, 64, 200]), block_size=rng.choice([1, 2, 4]), max_num_seqs=rng.choice([2, 5]),
        max_num_batched_tokens=rng.choice([5, 16]), policy="priority", watermark=0.0,
    )  # fmt: skip
    doomed = [
        beam_request(f"doomed {i}", prompt, BeamSearchParams(5, n=3, max_tokens=20), priority=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    coming = [*searches(), *crowd(), *doomed]
    rng.shuffle(coming)
    said: dict = {}
    for _ in range(3000):
        if not coming and not engine.has_unfinished():
            break
        if coming and rng.random() < 0.4:
            engine.add_request(coming.pop())
        elif rng.random() < 0.1:
            engine.abort(f"doomed {rng.randrange(3)}")
        for output in engine.step():
            said.setdefault(output.request_id, []).append(output)
        check_memory(engine)
        poison_free_memory(engine)
    check_drained(engine)
    assert_right(said)
    assert {r.request_id: tokens(said[r.request_id]) for r in crowd()} == solo_answers()


@pytest.mark.parametrize("kv_tokens", [24, 400])
@pytest.mark.parametrize("steps", range(0, 9, 2))
def test_abort_ends_the_whole_search(kv_tokens, steps):
    """Its beams, running, parked or waiting, are gone at once; each of its answers hears it."""
    engine = engine_over(kv_tokens=kv_tokens, block_size=2, max_num_seqs=3, watermark=0.0)
    engine.add_request(beam_request("a", PROMPTS[0], BeamSearchParams(5, n=3, max_tokens=12)))
    for _ in range(steps):
        assert engine.step() == []
    last = engine.abort("a")
    assert [(out.index, out.finish_reason, out.new_token_ids) for out in last] == [
        (i, FinishReason.ABORT, ()) for i in range(3)
    ]
    assert engine.stats.sequences_aborted == 3
    check_drained(engine)
    assert engine.abort("a") == []
    assert engine.step() == []


def test_one_answer_taken_back():
    """It is not told; the others come with their own index, and the last one taken ends the search."""
    engine = engine_over()
    params = BeamSearchParams(4, n=3, max_tokens=6)
    engine.add_request(beam_request("a", PROMPTS[0], params))
    engine.add_request(beam_request("b", PROMPTS[0], params))
    engine.add_request(beam_request("c", PROMPTS[0], params))
    engine.step()
    assert [out.index for out in engine.abort("a", 1)] == [1]
    assert engine.abort("a", 1) == []
    assert [out.index for i in (2, 0, 1) for out in engine.abort("b", i)] == [2, 0, 1]
    assert "b" not in engine.live
    said = run(engine, [])
    assert [out.index for out in said["a"]] == [0, 2]
    assert [out.new_token_ids for out in said["a"]] == [said["c"][i].new_token_ids for i in (0, 2)]
    assert (engine.stats.sequences_finished, engine.stats.sequences_aborted) == (5, 4)
    check_drained(engine)


def test_abort_above_the_engine():
    """What of the search is still in the engine is named, and nothing of it comes back."""
    engine = engine_over()
    beams = ResubmittedBeams(engine)
    [first] = beams.start(searches()[0])
    engine.add_request(first)
    _, following = beams.take(engine.step())
    assert len(following) == 4
    for request in following:
        engine.add_request(request)
    assert sorted(beams.abort("beam 0")) == sorted(request.request_id for request in following)
    assert beams.abort("beam 0") == []
    for request in following:
        engine.abort(request.request_id)
    assert beams.take(engine.step()) == ([], [])
    check_drained(engine)


def test_what_each_way_computes():
    """Fork: prompt and one token per beam and step.  Resubmit: the same up to a block, or all without a cache."""
    width, steps, prompt = 4, 9, list(range(20, 43))
    params = BeamSearchParams(width, n=2, max_tokens=steps, ignore_eos=True)
    costs = {}
    for way, through, options in (
        ("fork", run, {"enable_prefix_caching": False}),
        ("resubmit", resubmit, {}),
        ("uncached", resubmit, {"enable_prefix_caching": False}),
    ):
        engine = engine_over(block_size=4, **options)
        first, second = through(engine, [beam_request("a", prompt, params)])["a"]
        assert first.counters.tokens_computed == engine.stats.tokens_computed
        assert first.counters.forwards == 1 + width * (steps - 1)
        assert first.counters.cached_tokens == 0
        assert (second.counters.tokens_computed, second.counters.forwards) == (0, 0)
        assert first.counters.prompt_tokens == second.counters.prompt_tokens == 23
        assert (first.counters.output_tokens, second.counters.output_tokens) == (steps, steps)
        assert engine.stats.forwards == steps
        costs[way] = engine.stats.tokens_computed
    assert costs["fork"] == 23 + width * (steps - 1)
    assert costs["uncached"] == 23 + width * sum(23 + done for done in range(1, steps))
    # The part of a text behind its last full block is computed again: 4 tokens where that is just complete.
    assert costs["resubmit"] == 23 + width * sum((23 + done - 1) % 4 + 1 for done in range(1, steps))


def test_cached_tokens_count_once():
    """Of the prompt, at first admission; what beams find again of their own is no hit."""
    engine = engine_over(block_size=4, kv_tokens=64, max_num_seqs=2, watermark=0.0)
    params = BeamSearchParams(4, max_tokens=8, ignore_eos=True)
    prompt = list(range(20, 33))
    [cold] = run(engine, [beam_request("cold", prompt, params)])["cold"]
    [warm] = run(engine, [beam_request("warm", prompt, params)])["warm"]
    assert (cold.counters.cached_tokens, warm.counters.cached_tokens) == (0, 12)
    assert warm.new_token_ids == cold.new_token_ids
    assert (engine.stats.cache.queries, engine.stats.cache.hits) == (26, 12)
    assert engine.stats.tokens_emitted == 16


def test_beams_share_their_blocks():
    """8 beams hold the prompt's blocks once, and of the rest no more than their own tokens need."""
    engine = engine_over(block_size=4, max_num_seqs=8)
    engine.add_request(beam_request("a", range(20, 60), BeamSearchParams(8, max_tokens=12, ignore_eos=True)))
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, engine.kv.usage().reserved)
    assert 40 + 8 <= most <= 40 + 8 * 12
    assert engine.stats.cache.copies > 0


def test_refusals():
    """By field, before anything has changed."""
    engine = engine_over(max_model_len=32)
    width = 97 - len(EOS)
    for field, request in (
        ("beam_width", beam_request("a", [5], BeamSearchParams(width + 1))),
        ("beam_width", beam_request("a", [5], BeamSearchParams(width, stop_token_ids=[50]))),
        ("stop_token_ids", beam_request("a", [5], BeamSearchParams(2, stop_token_ids=[97]))),
        ("prompt_token_ids", beam_request("a", [], BeamSearchParams(2))),
        ("prompt_token_ids", beam_request("a", [5] * 32, BeamSearchParams(2))),
        ("params", replace(ask("a", [5]), beam=BeamSearchParams(2))),
    ):
        for add in (engine.add_request, ResubmittedBeams(engine).start):
            with pytest.raises(InvalidValue) as error:
                add(request)
            assert error.value.field == field
        assert engine.live == {}
    engine.add_request(beam_request("a", [5], BeamSearchParams(width, max_tokens=1)))
    with pytest.raises(InvalidValue, match="request_id"):
        engine.add_request(beam_request("a", [5], BeamSearchParams(2)))
    [best] = run(engine, [])["a"]
    assert len(best.new_token_ids) == 1


@pytest.mark.parametrize("through", [run, resubmit])
def test_the_context_ends_a_search(through):
    """Without `max_tokens` the answers reach to the end of the context, and no further."""
    engine = engine_over(max_model_len=16)
    params = BeamSearchParams(3, n=3, max_tokens=None, ignore_eos=True)
    said = through(engine, [beam_request("a", PROMPTS[0], params)])["a"]
    assert [len(out.new_token_ids) for out in said] == [10] * 3
    assert {out.finish_reason for out in said} == {FinishReason.LENGTH}
    [want] = hf_beams(tiny_pair("llama")[0], [PROMPTS[0]], BeamSearchParams(3, n=3, max_tokens=10), ())
    assert [list(out.new_token_ids) for out in said] == [answer for answer, _ in want]
