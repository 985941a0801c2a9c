"""Public faults of prefix caches and shared blocks, with their numbers, through the whole engine."""

from __future__ import annotations

import pytest
import torch
from support.engines import ask, build, run, tokens
from support.invariants import check_drained, check_memory
from support.watching import Listening
from tagged import Ending, TaggedModel

from common.protocol import Engine, Request
from common.sequence import Sequence

MODEL = TaggedModel()


def engine_of(num_blocks: int = 64, **options: object) -> Engine:
    """Stage 5 with so many blocks of 4."""
    return build("stage5_prefix_sharing", options.pop("model", MODEL), kv_tokens=4 * num_blocks, **options)


def prompt(length: int, first: int = 7) -> list[int]:
    """A text; with another first token it shares no block with it."""
    return [first, *((3 * i * i + i + 5) % 64 for i in range(1, length))]


def serve(engine: Engine, request: Request) -> int:
    """Run a request to the end, as right as alone; how many of its tokens were found in the cache."""
    engine.add_request(request)
    said = []
    while engine.has_unfinished():
        said += engine.step()
        check_memory(engine)
        pool = engine.kv.blocks.pool
        held = sum(count > 0 for count in pool.ref_counts)
        cached = sum(block in pool.hash_of for block in pool.free_blocks)
        empty = sum(block not in pool.hash_of for block in pool.free_blocks)
        assert held + cached + empty == pool.num_blocks
    assert tokens(said) == solo(request)[0]
    return said[-1].counters.cached_tokens


def solo(request: Request) -> list[list[int]]:
    """Its answers from a fresh stage 1."""
    said = run(build("stage1_naive", MODEL), [request])[request.request_id]
    return [tokens(said, index) for index in range(request.params.n)]


def test_prompts_shorter_than_a_block():
    """B11: P = 3 twice finds and stores nothing; then 6, 9 and 13, each beginning with the one before."""
    engine = engine_of()
    assert [serve(engine, ask("a", prompt(3), max_tokens=1)) for _ in range(2)] == [0, 0]
    assert engine.kv.blocks.pool.hash_of == {}
    assert [serve(engine, ask("a", prompt(length), max_tokens=3)) for length in (6, 9, 13)] == [0, 4, 8]
    check_drained(engine)


def test_the_whole_prompt_is_in_the_cache():
    """B13: P = 8 twice, then 12 with the same 8; P = 4 twice: one block less, and the logits of the cold run."""
    for lengths, hits in (((8, 8, 12), [0, 4, 8]), ((4, 4), [0, 0])):
        warm = Listening(MODEL)
        engine = engine_of(model=warm)
        assert [serve(engine, ask("a", prompt(length), max_tokens=2)) for length in lengths] == hits
        for i, length in enumerate(lengths):
            cold = Listening(MODEL)
            serve(engine_of(model=cold), ask("a", prompt(length), max_tokens=2))
            for mine, other in zip(warm.heard[2 * i : 2 * i + 2], cold.heard, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_block_that_was_used_for_other_text_is_not_found():
    """B14: pool of 3: X (P = 9), Y (P = 8, its second block X's ids), X: finds its first block, not Y's second."""
    engine = engine_of(3)
    x = prompt(9)
    y = [9, 9, 9, 9, *x[4:8]]
    assert [serve(engine, ask("r", text, max_tokens=1)) for text in (x, y, x)] == [0, 0, 4]


def test_a_hit_on_a_free_block_keeps_its_name():
    """B16: P = 9 three times: runs 2 and 3 both find 8."""
    engine = engine_of()
    assert [serve(engine, ask("a", prompt(9), max_tokens=4)) for _ in range(3)] == [0, 8, 8]


def test_blocks_are_found_when_they_are_full_and_computed():
    """B16: in chunks of 3, somebody who asks after each chunk finds 0, 1 and 2 blocks; a second request finds 8."""
    engine = engine_of(max_num_batched_tokens=3, max_num_seqs=3)
    first, second = (ask(name, prompt(9), max_tokens=4) for name in "ab")
    engine.add_request(first)
    said: dict[str, list] = {"a": engine.step(), "b": []}
    engine.add_request(second)
    found = [len(engine.kv.blocks.match(Sequence(second)))]
    while engine.has_unfinished():
        for output in engine.step():
            said[output.request_id].append(output)
        found.append(len(engine.kv.blocks.match(Sequence(second))))
    assert found[:3] == [0, 1, 2]
    assert said["b"][-1].counters.cached_tokens == 8
    assert [tokens(said[name]) for name in "ab"] == solo(first) * 2


def test_twins_of_one_step_and_a_third_later():
    """B17: of two equal prompts (P = 9) that come together the second waits a step and finds 8, like a third."""
    engine = engine_of()
    requests = [ask(name, prompt(9), max_tokens=5) for name in "abc"]
    engine.add_request(requests[0]), engine.add_request(requests[1])
    said: dict[str, list] = {name: [] for name in "abc"}
    for step in range(7):
        if step == 1:
            engine.add_request(requests[2])
        for output in engine.step():
            said[output.request_id].append(output)
        check_memory(engine)
    assert [outputs[-1].counters.cached_tokens for outputs in said.values()] == [0, 8, 8]
    assert [tokens(outputs) for outputs in said.values()] == solo(requests[0]) * 3
    check_drained(engine)


def test_a_hit_is_counted_when_it_is_taken():
    """B19: A is looked at while 8 are cached and there is no room; R pushes them out; A enters with 0."""
    engine = engine_of(6)
    a = ask("A", prompt(9), max_tokens=3)
    serve(engine, a)
    engine.add_request(ask("R", prompt(12, first=9), max_tokens=10))
    engine.step()
    engine.add_request(a)
    engine.step()
    [waiting] = [seq for seq in engine.sequences() if seq.request_id == "A"]
    assert (len(engine.kv.blocks.match(waiting)), waiting.num_computed_tokens) == (2, 0)
    said = [output for outputs in run(engine, []).values() for output in outputs if output.request_id == "A"]
    assert said[-1].counters.cached_tokens == 0
    assert tokens(said) == solo(a)[0]


@pytest.mark.parametrize("change", [{1: 31, 2: -1}, {1: -1, 2: 31}, {4: 31, 5: -1}, {0: 1}, {7: 1}])
def test_prompts_that_a_weak_hash_takes_for_equal(change):
    """B20: P = 9, and ids moved so that a base-31 polynomial collides: 256 bits of SHA-256 do not."""
    engine = engine_of()
    one = [20, 21, 22, 23, 24, 25, 26, 27, 28]
    two = [token + change.get(i, 0) for i, token in enumerate(one)]
    hits = [serve(engine, ask("a", text, max_tokens=4)) for text in (one, two)]
    assert hits == [0, 0 if min(change) < 4 else 4]
    assert all(len(name) == 32 for name in engine.kv.blocks.pool.block_of)


def test_another_tenants_salt_finds_nothing():
    """B20: the same prompt under two salts and without: only one's own is found."""
    engine = engine_of()
    plain = ask("a", prompt(9), max_tokens=2)
    salted = [
        Request("a", plain.prompt_token_ids, plain.params, cache_salt=salt) for salt in ("x", "y", "\ud800")
    ]
    assert [serve(engine, request) for request in (plain, *salted, plain, *salted)] == [0] * 4 + [8] * 4


def test_the_deepest_block_of_a_chain_goes_first():
    """B22: pool of 5: P = 16 ends; P = 8 takes the empty block and the deepest; the first prompt finds 12."""
    engine = engine_of(5)
    texts = (prompt(16), prompt(8, first=9), prompt(16))
    assert [serve(engine, ask("a", text, max_tokens=1)) for text in texts] == [0, 0, 12]


def test_least_recently_used_goes_first():
    """B23: pool of 9: S, A, B (P = 9 each), S again, then C (P = 17): S still finds 8, A nothing."""
    engine = engine_of(9)
    s, a, b, c = prompt(9), prompt(9, first=8), prompt(9, first=9), prompt(17, first=10)
    hits = [serve(engine, ask("r", text, max_tokens=1)) for text in (s, a, b, s, c, s, a)]
    assert hits == [0, 0, 0, 8, 0, 8, 0]


def test_what_is_computed_again_is_no_hit():
    """B25: 8 random prompts, a pool that forces preemption: hit rate 0, no cached tokens."""
    engine = engine_of(12, watermark=0.0)
    requests = [ask(str(i), prompt(9 + i % 3, first=10 + i), max_tokens=10) for i in range(8)]
    said = run(engine, requests)
    assert engine.stats.preemptions > 0
    assert engine.stats.cache.hit_rate == 0
    assert engine.stats.cache.queries == sum(len(request.prompt_token_ids) for request in requests)
    for request in requests:
        assert tokens(said[request.request_id]) == solo(request)[0]
        assert said[request.request_id][-1].counters.cached_tokens == 0


def test_cached_tokens_are_counted_at_first_admission():
    """B25: a request that hit 8 of 9, and is preempted later, still says 8."""
    engine = engine_of(8, watermark=0.0, max_num_seqs=4)
    serve(engine, ask("a", prompt(9), max_tokens=1))
    said = run(engine, [ask("big", prompt(9, first=9), max_tokens=12), ask("hit", prompt(9), max_tokens=12)])
    assert engine.stats.preemptions > 0
    assert {name: outputs[-1].counters.cached_tokens for name, outputs in said.items()} == {
        "big": 0,
        "hit": 8,
    }
    assert (engine.stats.cache.hits, engine.stats.cache.queries) == (8, 27)


@pytest.mark.parametrize("budget", [64, 4])
def test_prompt_log_probabilities_of_a_cached_prompt(budget):
    """B26: P = 9, sent twice, after the same prompt without them; whole and in chunks of 4: the same 9 entries."""
    engine = engine_of(max_num_batched_tokens=budget, max_num_seqs=4)
    run(engine, [ask("plain", prompt(9), max_tokens=2)])
    request = ask("a", prompt(9), prompt_logprobs=1, max_tokens=2)
    [first], [second], [cold] = (
        [output.prompt_logprobs for output in run(which, [request])["a"] if output.prompt_logprobs]
        for which in (engine, engine, build("stage1_naive", MODEL))
    )
    assert len(first) == 9
    assert first[0] is None
    for other in (second, cold):
        for mine, its in zip(first[1:], other[1:], strict=True):
            assert mine.keys() == its.keys()
            for token in mine:
                assert mine[token].logprob == pytest.approx(its[token].logprob, abs=1e-10)
                assert mine[token].rank == its[token].rank


def test_a_partly_filled_tail_has_one_writer():
    """B28: A (P = 6) decodes; B, C and D have the same tokens and other seeds: each finds 4, each as alone."""
    engine = engine_of()
    requests = [ask(name, prompt(6), temperature=1.0, seed=i, max_tokens=8) for i, name in enumerate("ABCD")]
    engine.add_request(requests[0])
    said: dict[str, list] = {name: [] for name in "ABCD"}
    said["A"] += engine.step()
    for request in requests[1:]:
        engine.add_request(request)
    while engine.has_unfinished():
        for output in engine.step():
            said[output.request_id].append(output)
        check_memory(engine)
    assert [tokens(said[request.request_id]) for request in requests] == [solo(r)[0] for r in requests]
    assert len({tuple(tokens(outputs)) for outputs in said.values()}) == 4
    assert [outputs[-1].counters.cached_tokens for outputs in said.values()] == [0, 4, 4, 4]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_fork_has_owners_of_its_own(order):
    """B29: P = 6, n = 2: full block 2, tail 2 until copied; one is taken back, the other goes on as alone."""
    engine = engine_of(num_blocks=6)
    request = ask("a", prompt(6), n=2, temperature=1.0, seed=3, max_tokens=6)
    engine.add_request(request)
    said = engine.step()
    full, tail = engine.sequences()[0].block_table
    owners = engine.kv.blocks.pool.ref_counts
    assert (owners[full], owners[tail]) == (2, 2)
    said += engine.step()
    assert (owners[full], owners[tail]) == (2, 1)
    engine.abort("a", order[0])
    assert (owners[full], engine.stats.cache.copies) == (1, 1)
    check_memory(engine)
    said += run(engine, []).get("a", [])
    assert tokens(said, order[1]) == solo(request)[order[1]]
    assert owners == [0] * 6
    check_drained(engine)


@pytest.mark.parametrize("lengths", [(2, 5, 8), (8, 5, 2), (5, 2, 8)])
def test_answers_that_end_at_different_steps(lengths):
    """B31: n = 3, ends after 2, 5 and 8 tokens: three answers, each whole; the memory of each goes with it."""
    request = ask("a", prompt(6), n=3, temperature=1.0, seed=5, max_tokens=20, stop_token_ids=(2,))
    engine = engine_of()
    Ending(engine, lengths)
    engine.add_request(request)
    said, alive = [], []
    while engine.has_unfinished():
        said += engine.step()
        check_memory(engine)
        alive.append(len(engine.sequences()))
    assert alive == [sum(step < length for length in lengths) for step in range(1, 9)]
    other = build("stage1_naive", MODEL)
    Ending(other, lengths)
    whole = run(other, [request])["a"]
    for index, length in enumerate(lengths):
        assert tokens(said, index) == tokens(whole, index)
        assert len(tokens(said, index)) == length
    check_drained(engine)


def test_abort_of_the_parent_reaches_all():
    """B31: after 3 tokens of each, all three end, and their blocks are free."""
    engine = engine_of()
    engine.add_request(ask("a", prompt(6), n=3, temperature=1.0, seed=5, max_tokens=20))
    for _ in range(3):
        engine.step()
    assert sorted(output.index for output in engine.abort("a")) == [0, 1, 2]
    assert engine.step() == []
    check_drained(engine)


def test_seeded_answers_differ_and_repeat():
    """B32: n = 4, seed 1, P = 6, 8 tokens, twice: four different texts, the same four, those of stage 1."""
    request = ask("a", prompt(6), n=4, temperature=1.0, seed=1, max_tokens=8)
    engine = engine_of()
    first, second = ([tokens(run_, index) for index in range(4)]
                     for run_ in (run(engine, [request])["a"] for _ in range(2)))  # fmt: skip
    assert first == second == solo(request)
    assert len({tuple(text) for text in first}) == 4
    assert all(len(text) == 8 for text in first)
