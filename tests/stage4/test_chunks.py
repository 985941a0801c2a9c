"""Chunks of a prompt give what the whole prompt gives: tokens, logits, log probabilities."""

from __future__ import annotations

import pytest
import torch
from support.engines import answers, ask, build, run, tokens
from support.hf import tiny_pair
from support.hf_oracle import make_pair
from support.watching import Listening, starve


def engine_over(model, **options):
    """Stage 4 over a model."""
    return build("stage4_continuous", model, **options)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_last_chunk_that_fills_its_block(length):
    """B01: blocks of 4, chunks of 4, max_tokens 3: blocks held after each forward, and the unchunked tokens."""
    model = tiny_pair("llama")[1]
    request = ask("a", [(7 * i * i + 3 * i + 5) % 97 for i in range(length)], max_tokens=3, ignore_eos=True)
    engine = engine_over(model, max_num_batched_tokens=4, max_num_seqs=4)
    engine.add_request(request)
    [seq] = engine.sequences()
    held, said = [], []
    while engine.has_unfinished():
        said += engine.step()
        held.append(len(seq.block_table))
    written = [min(4 * (i + 1), length) + max(0, i + 1 - -(-length // 4)) for i in range(len(held))]
    assert held[:-1] == [-(-count // 4) for count in written[:-1]]
    assert held[-1] == 0
    assert tokens(said) == answers(engine_over(model), [request])["a"]


@pytest.mark.parametrize("budget", [16, 5])
def test_a_prompt_longer_than_the_budget_is_served(budget):
    """B53: budget 16, context 64, P = 20: chunked, and never an empty success."""
    model = tiny_pair("llama")[1]
    request = ask("a", [(3 * i + 5) % 97 for i in range(20)], max_tokens=6, ignore_eos=True)
    engine = engine_over(model, max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=4)
    said = run(engine, [request])["a"]
    assert len(tokens(said)) == 6
    assert tokens(said) == answers(build("stage1_naive", model), [request])["a"]
    assert said[0].counters.forwards == 6 - 1 + -(-20 // budget)


def test_a_place_that_computes_a_chunk_is_not_idle():
    """Three chunks and two decodes in one of two places: five places were idle, though three drew no token."""
    engine = engine_over(tiny_pair("llama")[1], max_num_batched_tokens=4, max_num_seqs=2)
    run(engine, [ask("a", range(5, 17), max_tokens=3, ignore_eos=True)])
    assert (engine.stats.forwards, engine.stats.slot_steps, engine.stats.idle_slot_steps) == (5, 10, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [4, 7])
def test_logits_in_chunks(dtype, budget, record_property):
    """B68: the row that predicts the first token: float32 within 1e-4, bfloat16 flips only near ties."""
    _, model = make_pair("llama", dtype)
    for length in (9, 17, 30):
        request = ask("a", [(7 * i * i + 3 * i + 5) % 97 for i in range(length)], max_tokens=1)
        rows = []
        for tokens_per_step in (budget, 1024):
            listening = Listening(model)
            run(engine_over(listening, max_num_batched_tokens=tokens_per_step, max_num_seqs=4), [request])
            rows.append(torch.cat(listening.heard).float())
        chunked, whole = rows
        assert chunked.shape == whole.shape == (1, 97), "an unfinished chunk asks for no logits"
        difference = (chunked - whole).abs().max().item()
        record_property("largest difference", difference)
        assert difference < (1e-4 if dtype == torch.float32 else 0.25)
        best, second = whole[0].topk(2).values.tolist()
        assert chunked.argmax() == whole.argmax() or (dtype == torch.bfloat16 and best - second < 0.5)


@pytest.mark.parametrize("budget", [2, 4, 5, 1024])
@pytest.mark.parametrize("starved", [set(), {4}])
def test_prompt_log_probabilities(budget, starved):
    """B26: P = 9, one entry per position, with the values of the whole prompt, whatever chunks or preemption."""
    request = ask("a", [(3 * i) % 97 for i in range(9)], prompt_logprobs=1, max_tokens=6, ignore_eos=True)
    model = tiny_pair("llama")[1]
    [whole] = [o.prompt_logprobs for o in run(engine_over(model), [request])["a"] if o.prompt_logprobs]
    engine = engine_over(model, max_num_batched_tokens=budget, max_num_seqs=2)
    starve(engine, starved)
    [chunked] = [o.prompt_logprobs for o in run(engine, [request])["a"] if o.prompt_logprobs]
    assert engine.stats.preemptions == len(starved)
    assert len(chunked) == len(whole) == 9
    assert chunked[0] is None
    for mine, theirs in zip(chunked[1:], whole[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for token, entry in mine.items():
            assert entry.rank == theirs[token].rank
            assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-6)


def test_prompt_log_probabilities_survive_a_preemption_in_the_prompt():
    """B26: memory lost between two chunks: no position is scored twice or left out."""
    prompt = [(3 * i) % 97 for i in range(14)]
    request = ask("b", prompt, prompt_logprobs=0, max_tokens=2, ignore_eos=True)
    model = tiny_pair("llama")[1]
    [whole] = [o.prompt_logprobs for o in run(engine_over(model), [request])["b"] if o.prompt_logprobs]
    engine = engine_over(model, kv_tokens=20, max_num_batched_tokens=5, max_num_seqs=2, watermark=0.0)
    engine.add_request(request)
    engine.step()
    engine.step()
    [seq] = engine.sequences()
    assert 0 < seq.num_computed_tokens < 14
    hostages = engine.kv.blocks.pool.allocate(engine.kv.blocks.pool.num_free)
    while not engine.stats.preemptions:
        assert engine.step() == []
    engine.kv.blocks.pool.free(hostages)
    [got] = [o.prompt_logprobs for o in run(engine, [])["b"] if o.prompt_logprobs]
    assert [sorted(e or ()) for e in got] == [sorted(e or ()) for e in whole]
    assert [e[t].logprob for e, t in zip(got[1:], prompt[1:], strict=True)] == pytest.approx(
        [e[t].logprob for e, t in zip(whole[1:], prompt[1:], strict=True)], abs=1e-6
    )
