"""Memory lost at a chosen token, on every stage that may take it: nobody can tell from the answer."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run, tokens
from support.hf import tiny_pair
from support.invariants import check_drained
from support.scripted import ScriptedModel
from support.watching import Watch, starve

from common import LLM, SamplingParams

PROMPT = [5, 60, 7, 81, 9, 33]  # so that in blocks of 4 the tokens after output 3 and 7 open a block
SAMPLED = {"temperature": 1.0, "seed": 1}


def engine_over(stage: str, model, **options):
    """An engine of a stage that preempts."""
    engine = build(stage, model, **options)
    if not engine.capabilities.preempts:
        pytest.skip("this stage never takes memory back")
    return engine


def found_again(engine, length: int) -> int:
    """Tokens that a sequence of this length finds in the cache when it comes back: its full blocks, not all."""
    caches = engine.capabilities.shares_prefixes and engine.config.enable_prefix_caching
    return (length - 1) // engine.config.block_size * engine.config.block_size if caches else 0


@pytest.mark.parametrize("after", [{3}, {7}, {3, 7}])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {"temperature": 1.0}])
def test_preempted_after_some_tokens(stage, after, sampling):
    """B40, B41: P = 6, 10 tokens, greedy, seeded and not: prompt and answer are computed again, the text goes on."""
    model = tiny_pair("llama")[1]
    request = ask("a", PROMPT, max_tokens=10, ignore_eos=True, **sampling)
    engine = engine_over(stage, model)
    starve(engine, after)
    watch = Watch(engine)
    said = run(engine, [request])["a"]
    assert engine.stats.preemptions == said[-1].counters.preemptions == len(after)
    assert tokens(said) == tokens(run(build("stage1_naive", model), [request])["a"])
    resumed = {6 + outputs: found_again(engine, 6 + outputs) for outputs in after}
    starts = [len(forward.parts) and forward.positions[0] for forward in watch.forwards]
    ends = [forward.positions[-1] + 1 for forward in watch.forwards]
    for length, found in resumed.items():
        assert (found, length) in zip(starts, ends, strict=True), (
            "all that was lost is computed again, in one go"
        )
    lost = sum(length - 1 - found for length, found in resumed.items())
    assert engine.stats.tokens_computed == 6 + 9 + lost
    check_drained(engine)


def test_the_younger_of_two_is_preempted_by_need(stage):
    """B40: no tricks: A and B fill 4 blocks of 4, and B (P = 6) finds no third one after 3 tokens."""
    model = tiny_pair("llama")[1]
    requests = [ask("A", [11, 12, 13, 14], max_tokens=4, ignore_eos=True),
                ask("B", PROMPT, max_tokens=9, ignore_eos=True, **SAMPLED)]  # fmt: skip
    engine = engine_over(stage, model, kv_tokens=16, max_num_seqs=2, watermark=0.0)
    watch = Watch(engine)
    said = run(engine, requests)
    assert {name: outputs[-1].counters.preemptions for name, outputs in said.items()} == {"A": 0, "B": 1}
    b = [n for forward in watch.forwards for name, n in forward.parts if name == "B"]
    assert (b[0], b[3]) == (6, 9 - found_again(engine, 9)), "its fourth token would have opened a third block"
    for request in requests:
        alone = run(build("stage1_naive", model), [request])[request.request_id]
        assert tokens(said[request.request_id]) == tokens(alone)


def test_whole_blocks_and_one_forced_preemption(stage):
    """B04: P = 8 in blocks of 4, alone, preempted before its first decode: 8 tokens in finitely many steps."""
    script = {9: (8, list(range(20, 28)))}
    engine = engine_over(stage, ScriptedModel(script))
    starve(engine, {1})
    engine.add_request(ask("a", [9] + [50] * 7, max_tokens=8))
    said = [output for _ in range(9) for output in engine.step()]  # one step more than tokens
    assert tokens(said) == script[9][1]
    assert engine.stats.preemptions == 1
    check_drained(engine)


@pytest.mark.parametrize("after", [3, 7])
def test_log_probabilities_after_preemption(stage, after):
    """B43: one entry per token, of the prompt one per position, and the values of an undisturbed run."""
    model = tiny_pair("llama")[1]
    request = ask("a", PROMPT, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1, **SAMPLED)
    engine = engine_over(stage, model)
    starve(engine, {after})
    said = run(engine, [request])["a"]
    calm = run(build(stage, model), [request])["a"]
    assert engine.stats.preemptions == 1
    for mine, theirs in zip(said, calm, strict=True):
        [got], [want] = mine.logprobs, theirs.logprobs
        assert got.keys() == want.keys()
        assert [entry.logprob for entry in got.values()] == pytest.approx(
            [entry.logprob for entry in want.values()], abs=1e-6
        )
    assert [output.prompt_logprobs is not None for output in said] == [True] + [False] * 8
    assert len(said[0].prompt_logprobs) == len(PROMPT)


def test_a_stream_goes_on_after_preemption(stage):
    """B43: three tokens sent, memory lost, no seed: joined deltas are the final text, no token twice or lost."""
    params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True, logprobs=1)
    prompt = list(range(40, 46))

    def stream(after: set[int]) -> tuple[str, list, int]:
        llm = LLM(stage=stage, model="tiny-llama", dtype="float32", max_model_len=64, kv_bytes=1 << 20,
                  kernel="reference", block_size=4)  # fmt: skip
        if not llm.engine.capabilities.preempts:
            pytest.skip("this stage never takes memory back")
        starve(llm.engine, after)
        outputs = [output.outputs[0] for output in llm.stream(prompt, params)]
        assert "".join(output.delta for output in outputs) == outputs[-1].text
        assert [len(output.token_ids) for output in outputs] == list(range(1, 10))
        assert len(outputs[-1].logprobs) == 9
        return outputs[-1].text, outputs[-1].token_ids, llm.engine.stats.preemptions

    *disturbed, preemptions = stream({3})
    *calm, _ = stream(set())
    assert preemptions == 1
    assert disturbed == calm
