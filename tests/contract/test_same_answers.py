"""The answers never change: every stage equals transformers' `generate`, token for token."""

from __future__ import annotations

import pytest
from support.engines import answers, ask, build
from support.hf import greedy, tiny_pair

VARIANTS = ["llama", "llama-llama3", "mistral-window", "qwen2", "qwen3-tied-biases"]
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31]


def prompts(vocab_size: int) -> list[list[int]]:
    """One prompt of each length, ids spread over the vocabulary."""
    return [[(7 * n + 13 * i * i + 5 * i) % vocab_size for i in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_to_transformers(stage, variant):
    """Tiny random models in float64, mixed lengths in one batch; mistral's window is shorter than most."""
    hf, model = tiny_pair(variant)
    todo = prompts(model.config.vocab_size)
    requests = [ask(str(i), p, max_tokens=4 + i % 9, ignore_eos=True) for i, p in enumerate(todo)]
    got = answers(build(stage, model, max_num_seqs=5), requests)
    for request in requests:
        want = greedy(hf, request.prompt_token_ids, request.params.max_tokens)
        assert got[request.request_id] == want, f"prompt of {len(request.prompt_token_ids)}"


def test_duplicate_prompts_and_order(stage):
    """The same prompt twice gives the same answer twice, and order does not matter."""
    hf, model = tiny_pair("llama")
    todo = prompts(model.config.vocab_size)[2:8] * 2
    requests = [ask(str(i), p, max_tokens=6, ignore_eos=True) for i, p in enumerate(todo)]
    forwards = answers(build(stage, model, max_num_seqs=4), requests)
    backwards = answers(build(stage, model, max_num_seqs=3), requests[::-1])
    assert forwards == backwards
    half = len(todo) // 2
    assert all(forwards[str(i)] == forwards[str(i + half)] for i in range(half))
    assert forwards["0"] == greedy(hf, tuple(todo[0]), 6)


def test_end_of_sequence_as_transformers_sees_it(stage):
    """With the model's own EOS ids in force, both stop at the same token."""
    hf, model = tiny_pair("qwen2")
    prompt = prompts(model.config.vocab_size)[6]
    free = greedy(hf, tuple(prompt), 12)
    eos = free[5]
    stopped = greedy(hf, tuple(prompt), 12, eos_token_id=eos)
    got = answers(build(stage, model), [ask("a", prompt, max_tokens=12, stop_token_ids=[eos])])
    assert got["a"] == stopped


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_prompts_around_block_boundaries(stage, block_size):
    """B01, B02: k blocks less one token, exactly, and one more; each block size."""
    _, model = tiny_pair("llama")
    engine = build(stage, model, block_size=block_size, max_num_seqs=4)
    if not engine.capabilities.paged and block_size != 4:
        pytest.skip("this stage has no blocks")
    hf, _ = tiny_pair("llama")
    lengths = sorted({max(1, k * block_size + d) for k in (1, 2, 3) for d in (-1, 0, 1)})
    requests = [
        ask(str(n), [(3 * i + n) % model.config.vocab_size for i in range(n)], max_tokens=2 * block_size + 1,
            ignore_eos=True)
        for n in lengths
    ]  # fmt: skip
    got = answers(engine, requests)
    for request in requests:
        want = greedy(hf, request.prompt_token_ids, request.params.max_tokens)
        assert got[request.request_id] == want
