"""Sampling through an engine: a request's tokens depend on itself alone, on every stage."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run, tokens
from support.hf import tiny_pair

from common.stages import find_stage

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11], [5, 6, 7]]


def mixed(seed: int = 3) -> list:
    """Greedy and sampled requests with all sorts of parameters."""
    return [
        ask("greedy", PROMPTS[0], max_tokens=7),
        ask("seeded", PROMPTS[1], temperature=1.0, seed=seed, max_tokens=9),
        ask("cut", PROMPTS[2], temperature=0.7, top_k=20, top_p=0.9, seed=seed, max_tokens=5),
        ask("penalised", PROMPTS[3], temperature=1.3, min_p=0.02, repetition_penalty=1.2, seed=seed,
            frequency_penalty=0.5, presence_penalty=0.3, logit_bias={4: 2.0}, max_tokens=8),
    ]  # fmt: skip


def all_tokens(stage: str, requests: list, **options) -> dict[str, list[int]]:
    """Tokens by request."""
    engine = build(stage, tiny_pair("llama")[1], **options)
    return {name: tokens(outputs) for name, outputs in run(engine, requests).items()}


def test_alone_in_a_batch_and_in_another_order(stage):
    """B94, B97, P8: neighbours, order and batch size change nothing."""
    together = all_tokens(stage, mixed(), max_num_seqs=4)
    assert all_tokens(stage, mixed()[::-1], max_num_seqs=2) == together
    for request in mixed():
        assert all_tokens(stage, [request])[request.request_id] == together[request.request_id]


def test_stage_1_is_the_reference(stage):
    """Seeded sampling too gives what stage 1 gives."""
    assert all_tokens(stage, mixed()) == all_tokens("stage1_naive", mixed())


def test_seeds(stage):
    """B32, B94: a seed repeats, another differs, n children differ, one seed and prompt give one text."""
    one, other = all_tokens(stage, mixed(3)), all_tokens(stage, mixed(4))
    assert one == all_tokens(stage, mixed(3))
    assert one["greedy"] == other["greedy"]
    assert one["seeded"] != other["seeded"]
    twins = [ask(name, [5, 6, 7], temperature=1.0, seed=42, max_tokens=8) for name in ("a", "b")]
    got = all_tokens(stage, twins)
    assert got["a"] == got["b"]
    engine = build(stage, tiny_pair("llama")[1])
    said = run(engine, [ask("n", [5, 6, 7], temperature=1.0, seed=42, max_tokens=8, n=4)])["n"]
    children = [tuple(tokens(said, index)) for index in range(4)]
    assert len(set(children)) == 4
    assert list(children[0]) == got["a"]


def test_unseeded_requests_differ_but_an_engine_repeats(stage):
    """Without a seed the request id and the engine's seed decide."""
    requests = [ask(name, [5, 6, 7], temperature=1.0, max_tokens=8) for name in ("a", "b")]
    got = all_tokens(stage, requests)
    assert got["a"] != got["b"]
    assert all_tokens(stage, requests) == got
    assert all_tokens(stage, requests, seed=1) != got


def test_logprobs(stage):
    """B43, B98: one entry per token, equal to stage 1's; the prompt's once, the first of them empty."""
    request = ask("a", PROMPTS[1], temperature=0.8, seed=1, logprobs=3, prompt_logprobs=2, max_tokens=5)
    said = run(build(stage, tiny_pair("llama")[1]), [request])["a"]
    reference = run(build("stage1_naive", tiny_pair("llama")[1]), [request])["a"]
    assert [len(output.logprobs) for output in said] == [1] * 5
    for output, token in zip(said, tokens(said), strict=True):
        [entry] = output.logprobs
        assert token in entry
        assert 3 <= len(entry) <= 4
    prompt = said[0].prompt_logprobs
    assert prompt[0] is None
    assert len(prompt) == len(PROMPTS[1])
    assert all(PROMPTS[1][i] in prompt[i] for i in range(1, len(prompt)))
    assert all(output.prompt_logprobs is None for output in said[1:])
    if find_stage(stage)[1].number > 1:
        for mine, theirs in zip(said, reference, strict=True):
            for token, entry in theirs.logprobs[0].items():
                assert mine.logprobs[0][token].logprob == pytest.approx(entry.logprob, abs=1e-5)
        for mine, theirs in zip(prompt[1:], reference[0].prompt_logprobs[1:], strict=True):
            assert mine.keys() == theirs.keys()
