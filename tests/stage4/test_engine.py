"""Stage 4 through the model: budget, batch limit, arrival order, chunks and preemption change nothing."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run, tokens
from support.hf import tiny_pair
from support.invariants import check_drained, check_memory
from support.scripted import ScriptedModel
from support.solo import crowd, solo_answers

from common.protocol import FinishReason


def engine_over(variant: str = "llama", **options):
    """Stage 4 over a tiny random model."""
    return build("stage4_continuous", tiny_pair(variant)[1], **options)


def texts(said: dict) -> dict[str, list[int]]:
    """Token ids by request."""
    return {name: tokens(outputs) for name, outputs in said.items()}


@pytest.mark.parametrize("budget", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("seats", [1, 2])
def test_budget_and_batch_limit_do_not_matter(budget, seats):
    """B68, B44: chunks of any size give the tokens of the unchunked run, seeded ones too."""
    engine = engine_over(max_num_batched_tokens=budget, max_num_seqs=seats)
    assert texts(run(engine, crowd())) == solo_answers()


@pytest.mark.parametrize("variant", ["mistral-window", "qwen3-tied-biases"])
def test_other_families_in_chunks(variant):
    """A sliding window and Q/K norms with history."""
    engine = engine_over(variant, max_num_batched_tokens=5, max_num_seqs=5)
    assert texts(run(engine, crowd())) == solo_answers(variant)


def test_arrival_order_and_time_do_not_matter():
    """Requests that arrive between the steps of others, last first."""
    engine = engine_over(max_num_seqs=3, max_num_batched_tokens=7)
    waiting, said = crowd(), {}
    while waiting or engine.has_unfinished():
        if waiting:
            engine.add_request(waiting.pop())
        for output in engine.step():
            said.setdefault(output.request_id, []).append(output)
    assert texts(said) == solo_answers()


@pytest.mark.parametrize(("kv_tokens", "block_size"), [(36, 4), (40, 8), (48, 2), (33, 1)])
def test_preemption_does_not_matter(kv_tokens, block_size):
    """B40, B41, B43: same tokens, one logprob entry per token, nothing said twice."""
    engine = engine_over(
        kv_tokens=kv_tokens, block_size=block_size, max_num_seqs=6, max_num_batched_tokens=16, watermark=0.0
    )
    said = run(engine, crowd())
    assert engine.stats.preemptions > 0, "the pool was meant to be too small"
    assert texts(said) == solo_answers()
    for outputs in said.values():
        assert all(len(output.logprobs) == len(output.new_token_ids) == 1 for output in outputs)
    check_drained(engine)


def test_no_token_comes_from_an_unfinished_chunk():
    """B44: chunks 1 and 2 of 3 are silent, and the generator is used once per token."""
    engine = engine_over(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add_request(ask("a", range(12), temperature=1.0, seed=7, max_tokens=6))
    [seq] = engine.sequences()
    draws = []
    original = seq.rng.random
    seq.rng.random = lambda: draws.append(1) or original()
    assert [engine.step(), engine.step()] == [[], []]
    assert draws == []
    said = run(engine, [])["a"]
    assert len(tokens(said)) == len(draws) == 6


def test_abort_between_two_chunks():
    """B116: no token after the abort, blocks freed once."""
    engine = engine_over(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add_request(ask("a", range(8)))
    engine.step()
    [last] = engine.abort("a")
    assert (last.finish_reason, last.new_token_ids) == (FinishReason.ABORT, ())
    assert engine.step() == []
    check_drained(engine)


def test_lone_request_with_whole_blocks_finishes():
    """B04: P = 8 in blocks of 4, alone, and with one forced preemption."""
    script = {9: (8, list(range(20, 28)))}
    for kv_tokens, others in ((64, 0), (20, 2)):
        engine = build("stage4_continuous", ScriptedModel(script), kv_tokens=kv_tokens, watermark=0.0)
        requests = [ask(str(i), [9] + [50] * 7, max_tokens=8) for i in range(1 + others)]
        said = run(engine, requests)
        assert all(tokens(outputs) == script[9][1] for outputs in said.values())
        assert (engine.stats.preemptions > 0) == bool(others)


def test_children_of_a_request_need_not_fit_together():
    """B47: n = 4 and room for one at full length: they take turns."""
    script = {9: (8, list(range(12, 52)))}
    engine = build("stage4_continuous", ScriptedModel(script), kv_tokens=48, max_num_seqs=4)
    said = run(engine, [ask("a", [9] + [50] * 7, n=4, max_tokens=40)])["a"]
    assert [tokens(said, index) for index in range(4)] == [script[9][1]] * 4


def test_a_block_granted_is_in_the_table_when_the_sequence_runs():
    """B05: a request pushed out of the step keeps no half-told grant; all invariants hold at every step."""
    script = {9: (8, list(range(20, 32))), 10: (8, list(range(30, 42)))}
    engine = build("stage4_continuous", ScriptedModel(script), kv_tokens=24, max_num_seqs=2, watermark=0.0)
    engine.add_request(ask("A", [9] + [50] * 7, max_tokens=12))
    said: dict[str, list] = {"A": [], "B": []}
    for step in range(60):
        if step == 1:
            engine.add_request(ask("B", [10] + [50] * 7, max_tokens=12))
        for output in engine.step():
            said[output.request_id] += output.new_token_ids
        check_memory(engine)
    assert said == {"A": script[9][1], "B": script[10][1]}


def test_what_outgrows_the_pool_alone_ends_with_length():
    """B46: P = 100 and max_tokens = 100 in 128 slots ends after 29 tokens; nothing goes round in circles."""
    engine = build(
        "stage4_continuous", ScriptedModel({9: (100, [3] * 100)}), kv_tokens=128, block_size=16,
        max_model_len=256, max_num_batched_tokens=256,
    )  # fmt: skip
    said = run(engine, [ask("a", [9] + [50] * 99, max_tokens=100)])["a"]
    assert len(tokens(said)) == 29
    assert said[-1].finish_reason == FinishReason.LENGTH
    assert engine.stats.preemptions == 0
