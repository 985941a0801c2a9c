"""Each stage beats the one before on its own counter, without a clock (the same trace, the same bytes)."""

from __future__ import annotations

from support.engines import ask, build
from support.scripted import ScriptedModel

from common.bench.record import Recorder, Run
from common.bench.scripted import CountingExecutor

STAGES = ("stage1_naive", "stage2_kvcache", "stage3_paged", "stage4_continuous", "stage5_prefix_sharing")


def trace() -> list:
    """Thirty requests of mixed lengths: prompts of 2 to 24 tokens, answers of 1 to 32."""
    return [ask(str(i), [9] * (2 + (7 * i) % 23), max_tokens=1 + (i * i * 5) % 32) for i in range(30)]


def serve(stage: str, requests: list, kv_tokens: int = 160) -> Run:
    """The run of a stage's own memory and schedule; which tokens are drawn does not matter here."""
    engine = build(stage, ScriptedModel({}), kv_tokens=kv_tokens, max_num_seqs=8, max_model_len=64)
    engine.executor = CountingExecutor()
    run = Recorder(engine).run(requests)
    assert [len(run.token_ids[request.request_id, 0]) for request in requests] == [
        request.params.max_tokens for request in requests
    ]
    return run


def test_stage_2_computes_fewer_tokens_per_token_emitted():
    """Each prompt once, and each token of an answer but its last; stage 1 all of it for every token."""
    naive, cached = (serve(stage, trace()).stats for stage in STAGES[:2])
    lengths = [(len(r.prompt_token_ids), r.params.max_tokens) for r in trace()]
    assert naive.tokens_computed == sum(n * p + n * (n - 1) // 2 for p, n in lengths)
    assert cached.tokens_computed == sum(p + n - 1 for p, n in lengths)
    assert cached.computed_per_emitted < naive.computed_per_emitted / 5


def test_stage_3_reserves_fewer_slots_for_the_same_batch():
    """Room for all eight at once in both: what they hold at most, and what of it is used."""
    contiguous, paged = (serve(stage, trace()[:8], kv_tokens=512) for stage in STAGES[1:3])
    assert [len(step.computed) for step in (contiguous.steps[0], paged.steps[0])] == [8, 8]
    assert max(s.usage.reserved for s in paged.steps) < max(s.usage.reserved for s in contiguous.steps)
    for step in paged.steps:
        stored = sum(part.context for part in step.computed)
        assert step.usage.reserved - stored < 4 * len(step.computed), "less than a block of waste each"


def test_stage_3_holds_more_requests_in_the_same_bytes():
    """The first batch is larger, and the same work takes fewer forwards, though memory runs dry at times."""
    contiguous, paged = (serve(stage, trace()) for stage in STAGES[1:3])
    assert len(paged.steps[0].computed) > len(contiguous.steps[0].computed)
    assert paged.stats.forwards < contiguous.stats.forwards


def test_stage_4_needs_fewer_forwards():
    """Mixed lengths, the same bytes and places: nobody waits for the slowest of a batch."""
    static, continuous = (serve(stage, trace(), kv_tokens=512).stats for stage in STAGES[2:4])
    assert continuous.forwards < 0.8 * static.forwards
    assert (
        continuous.idle_slot_steps / continuous.slot_steps < 0.5 * static.idle_slot_steps / static.slot_steps
    )
    assert continuous.tokens_emitted == static.tokens_emitted


def test_stage_5_computes_a_shared_prefix_once():
    """Twenty requests with 40 tokens in common, eight places: the first computes them, the others find them."""
    requests = [ask(str(i), [9] * 40 + [10 + i] * 4, max_tokens=8) for i in range(20)]
    plain, shared = (serve(stage, requests, kv_tokens=512).stats for stage in STAGES[3:])
    assert plain.tokens_computed == 20 * (44 + 7)
    assert shared.tokens_computed == plain.tokens_computed - 19 * 40
    assert (shared.cache.hits, shared.cache.queries) == (19 * 40, 20 * 44)


def test_stage_5_holds_a_shared_prompt_once():
    """Eight answers to a prompt of ten blocks, two more blocks each: at most 26 blocks are held, instead of 96."""
    request = ask("a", [9] * 40, n=8, max_tokens=8)
    plain, shared = (serve(stage, [request], kv_tokens=512) for stage in STAGES[3:])
    assert max(step.usage.reserved for step in plain.steps) == 4 * 8 * 12
    assert max(step.usage.reserved for step in shared.steps) == 4 * (10 + 8 * 2)
    assert (plain.stats.tokens_computed, shared.stats.tokens_computed) == (8 * (40 + 7), 40 + 8 * 7)


def test_nobody_gains_where_all_answers_are_alike():
    """Where the ideas buy nothing: equal lengths, no text in common, room for all: stages 2 to 5 do the same."""
    alike = [ask(str(i), [10 + i] * 8, max_tokens=16) for i in range(16)]
    counts = [serve(stage, alike, kv_tokens=512).stats for stage in STAGES[1:]]
    assert {(stats.forwards, stats.tokens_computed, stats.preemptions) for stats in counts} == {
        (32, 16 * (8 + 15), 0)
    }
