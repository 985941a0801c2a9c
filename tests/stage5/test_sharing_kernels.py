"""Forks and block copies on every kernel: batches with rows that have nothing to compute, copies that overlap."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.engines import ask, build, run, tokens
from support.interpreter import INTERPRETED
from support.invariants import check_drained, check_memory, poison_free_memory
from tagged import TaggedModel

KERNELS = ["triton"] if INTERPRETED else ["reference", "cpu"]


def engine_of(kernel: str, **options: object):
    """Stage 5 in float32, which all kernels compute."""
    return build("stage5_prefix_sharing", TaggedModel(dtype=torch.float32), kernel=kernel, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [3, 4, 5, 21])
def test_forks_beside_prompts_and_decodes(kernel, length):
    """Rows (child, 0) between others in one batch; the answers are those of stage 1."""
    model = TaggedModel(dtype=torch.float32)
    requests = [
        ask("first", range(5), max_tokens=6),
        ask("forked", [(5 * i + 3) % 64 for i in range(length)], n=3, temperature=1.0, seed=2, max_tokens=6),
        ask("last", range(30, 39), n=2, temperature=1.0, seed=3, max_tokens=6),
    ]
    engine = engine_of(kernel, max_num_batched_tokens=24)
    said: dict[str, list] = {}
    for i, request in enumerate(requests):
        engine.add_request(request)
        if i == 0:
            said["first"] = engine.step()
    batches = []
    while engine.has_unfinished():
        for output in engine.step():
            said.setdefault(output.request_id, []).append(output)
        batches.append([num_new for _, num_new in engine.last_batch])
        check_memory(engine)
        if kernel == "reference":
            poison_free_memory(engine)
    assert any(0 in batch and max(batch) > 1 for batch in batches)
    assert engine.stats.cache.copies == 1 + 2 * (length % 4 > 0)
    for request in requests:
        whole = run(build("stage1_naive", model), [request])[request.request_id]
        for index in range(request.params.n):
            assert tokens(said[request.request_id], index) == tokens(whole, index)
    check_drained(engine)


@pytest.mark.parametrize("kernel", KERNELS)
def test_copies_that_overlap(kernel):
    """All sources are read before a target is written: a chain, an exchange, and one source of two, in all arrays."""
    kv = engine_of(kernel, kv_tokens=32).kv
    slots = torch.arange(32)
    before = []
    for layer in kv.layers:
        for cache in layer:
            cache.copy_(torch.randn(cache.shape))
            before.append(kv.kernel.gather(cache, slots).view(8, 4, 1, 8).clone())  # [N, bs, Hkv, D]
    copies = {1: 0, 2: 1, 3: 4, 4: 3, 5: 6, 7: 6}
    kv._copy_blocks(copies)
    kv._copy_blocks({})
    after = [kv.kernel.gather(cache, slots).view(8, 4, 1, 8) for layer in kv.layers for cache in layer]
    assert len(after) == 4
    for old, new in zip(before, after, strict=True):
        for block in range(8):
            assert torch.equal(new[block], old[copies.get(block, block)])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is what runs this file in the interpreter")
def test_in_the_interpreter():
    """Triton's kernels, once more in a process where Triton interprets."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    child = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-1000:]
    assert "5 passed" in child.stdout
