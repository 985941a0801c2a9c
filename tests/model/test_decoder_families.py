"""Every family and variant against transformers with the same random weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.hf_oracle import (
    VARIANTS,
    hf_logits,
    make_pair,
    our_logits,
    pack,
    random_prompts,
    relative_error,
)

from common.model.linear import can_pack
from stage1_naive.no_cache import NoCache

PROMPTS = random_prompts([1, 7, 40, 2, 13])


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request):
    """A transformers model in float64 and our decoder."""
    return make_pair(request.param)


def test_each_prompt_alone(pair):
    """Float64 logits of every position agree to 1e-9 (B65: windows; B70: Q/K norm; B74: head_dim)."""
    hf, decoder = pair
    for prompt in PROMPTS:
        [ours] = our_logits(decoder, [prompt])
        assert ours.shape == (len(prompt), hf.config.vocab_size)
        assert relative_error(ours, hf_logits(hf, prompt)) < 1e-9


def test_packed_together(pair):
    """The same in one packed forward: no prompt sees its neighbours (B56, B58)."""
    hf, decoder = pair
    for prompt, ours in zip(PROMPTS, our_logits(decoder, PROMPTS), strict=True):
        assert relative_error(ours, hf_logits(hf, prompt)) < 1e-9


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_only_the_wanted_rows(family):
    """The short cut past the last block gives the rows that a full forward gives, also for no row at all."""
    hf, decoder = make_pair(family)
    batch = pack(PROMPTS)
    kv = NoCache(decoder.config)
    logits = decoder.forward(batch, kv)
    assert logits.shape == (len(PROMPTS), hf.config.vocab_size)
    for prompt, row in zip(PROMPTS, logits, strict=True):
        assert relative_error(row, hf_logits(hf, prompt)[-1]) < 1e-9
    none = decoder.forward(replace(batch, logits_rows=batch.logits_rows[:0]), kv)
    assert none.shape == (0, hf.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["llama-tied", "llama-biases", "mistral-window", "qwen2", "qwen3"])
def test_other_dtypes(variant, dtype):
    """Single and half precision, packed weights where the CPU has them, stay within a few roundings."""
    hf, decoder = make_pair(variant, dtype)
    exact, _ = make_pair(variant)
    rounding = torch.finfo(dtype).eps
    for prompt, ours in zip(PROMPTS, our_logits(decoder, PROMPTS), strict=True):
        truth = hf_logits(exact, prompt)
        theirs = relative_error(hf_logits(hf, prompt).double(), truth)
        assert ours.dtype == dtype
        assert relative_error(ours.double(), truth) < 1.5 * theirs + 4 * rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_and_in_a_batch_of_eight(dtype, record_property):
    """B68: float32 logits within 1e-4 and the same greedy token; bfloat16 may flip only a near tie."""
    _, decoder = make_pair("llama", dtype)
    prompts = random_prompts([3, 9, 1, 17, 5, 2, 30, 11], seed=1)
    packed = our_logits(decoder, prompts)
    for prompt, together in zip(prompts, packed, strict=True):
        [alone] = our_logits(decoder, [prompt])
        gap = (alone - together).abs().max().item()
        record_property("largest difference", gap)
        if dtype == torch.float32:
            assert gap < 1e-4
            assert torch.equal(alone.argmax(-1), together.argmax(-1))
        else:
            top = alone.float().topk(2).values  # [T, 2]
            flipped = alone.argmax(-1) != together.argmax(-1)
            assert gap < 0.25, "of logits that reach about 10"
            assert (top[:, 0] - top[:, 1])[flipped].le(0.25).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_neighbour_stays_alone(dtype, bad):
    """B58: NaN in one sequence leaves every bit of the others as it was."""
    _, decoder = make_pair("llama", dtype)
    poisoned = 5
    clean = [[token for token in prompt if token != poisoned] or [7] for prompt in PROMPTS]
    before = our_logits(decoder, [clean[0], [9, 9, 9], *clean[1:]])
    decoder.embedding = decoder.embedding.clone()
    decoder.embedding[poisoned] = bad
    after = our_logits(decoder, [clean[0], [9, poisoned, 9], *clean[1:]])
    assert after[1][1:].isnan().all()
    for index in (0, *range(2, len(before))):
        assert torch.equal(before[index], after[index])


def test_packed_and_plain_weights_agree(monkeypatch):
    """A machine without the private operators gets the same answers."""
    if not can_pack(torch.float32):
        pytest.skip("this CPU or torch has no packed linear layer")
    _, packed = make_pair("qwen3-tied-biases", torch.float32)
    monkeypatch.setattr("common.model.linear.can_pack", lambda dtype: False)
    _, plain = make_pair("qwen3-tied-biases", torch.float32)
    for ours, theirs in zip(our_logits(packed, PROMPTS), our_logits(plain, PROMPTS), strict=True):
        assert relative_error(ours, theirs) < 1e-5
