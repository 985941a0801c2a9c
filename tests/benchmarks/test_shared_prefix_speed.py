"""What reading a shared prefix once saves on the CPU: where the numbers of `shared_prefix.LEAST_SAVED` are from.

All sequences of a batch share 1,000 or 2,000 tokens and have 50 to 100 of their own.  Plain and shared calls take
turns, and medians are compared; `-s` prints them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
import torch

from common.batch import ForwardBatch
from stage3_paged.kernels import cpu
from stage5_prefix_sharing.shared_prefix import SharingRule, attend_shared, plan_sharing

pytestmark = [pytest.mark.slow, pytest.mark.timing]

LAYERS, BLOCK_SIZE, HEAD_SIZE = 8, 16, 64
SHAPES = {
    (9, 3): "the default model",
    (16, 4): "4 heads per group",
    (8, 4): "2 per group",
    (8, 8): "1 per group",
}
BATCHES = ((16, 1000), (32, 1000), (16, 2000), (32, 2000))  # sequences, shared tokens
ROUNDS = 7

# Measured 1.3 and 0.8 to 0.95, in a process that has just compiled the kernel and in one that found it on disk.
LEAST_GAIN, LEAST = 1.2, 0.7


class Decodes:
    """One decode step over some layers, as stage 5 would lay it out."""

    def __init__(self, heads: tuple[int, int], dtype: torch.dtype, num_seqs: int, shared: int) -> None:
        rng = np.random.default_rng(0)
        num_shared, num_own = shared // BLOCK_SIZE, 8
        order = rng.permutation(num_shared + num_seqs * num_own).astype(np.int32)
        tables = np.empty((num_seqs, num_shared + num_own), dtype=np.int32)  # [B, max blocks]
        tables[:, :num_shared] = order[:num_shared]
        tables[:, num_shared:] = order[num_shared:].reshape(num_seqs, num_own)
        lens = num_shared * BLOCK_SIZE + rng.integers(50, 101, num_seqs)  # [B]
        self.caches = [
            cpu.make_cache(len(order), BLOCK_SIZE, heads[1], HEAD_SIZE, dtype, "cpu") for _ in range(LAYERS)
        ]
        for cache in (cache for layer in self.caches for cache in layer):
            cache.copy_(torch.randn(cache.shape))
        self.q = torch.randn(num_seqs, heads[0], HEAD_SIZE).to(dtype)  # [T, Hq, D]
        nothing = torch.zeros(0, dtype=torch.int64)
        self.batch = ForwardBatch(
            input_ids=nothing,
            positions=nothing,
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32),
            seq_lens=torch.from_numpy(lens).int(),
            logits_rows=nothing,
            query_lens=[1] * num_seqs,
            context_lens=lens.tolist(),
            slot_mapping=nothing,
            block_tables=torch.from_numpy(tables),
        )
        rule = SharingRule(*heads, BLOCK_SIZE, tile=8, least_saved=1, device=torch.device("cpu"))
        self.plan = plan_sharing(self.batch, rule)

    def plain(self) -> torch.Tensor:
        """The last layer's output, row by row."""
        for caches in self.caches:
            out = cpu.paged_attention(
                self.q,
                *caches,
                self.batch.block_tables,
                self.batch.query_start,
                self.batch.seq_lens,
                HEAD_SIZE**-0.5,
                query_lens=self.batch.query_lens,
                context_lens=self.batch.context_lens,
            )
        return out

    def shared(self) -> torch.Tensor:
        """The same, the prefix read once."""
        for caches in self.caches:
            out = attend_shared(cpu, self.q, caches, self.plan, HEAD_SIZE**-0.5)
        return out

    def measure(self) -> tuple[float, float]:
        """Median milliseconds per layer of both."""
        seconds: dict[Callable, list[float]] = {self.plain: [], self.shared: []}
        for _ in range(ROUNDS + 1):
            for function, own in seconds.items():
                begin = time.perf_counter()
                function()
                own.append(time.perf_counter() - begin)
        plain, shared = (median(own[1:]) / LAYERS * 1e3 for own in seconds.values())
        return plain, shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=SHAPES.get)
def test_shared_against_plain(heads: tuple[int, int], dtype: torch.dtype, benchmark: Callable) -> None:
    """Sharing wins where each key head has one query head, and costs little where it does not win.

    A plain call reads the shared blocks from the processor's caches from the second sequence on, so what is
    saved is not memory traffic but loads: a vector of K or V serves 8 queries instead of the heads of a group.
    """
    rows = {}

    def run() -> None:
        for num_seqs, shared in BATCHES:
            decodes = Decodes(heads, dtype, num_seqs, shared)
            assert (decodes.plain() - decodes.shared()).abs().max() < 0.02  # the same work
            rows[num_seqs, shared] = min(
                (decodes.measure() for _ in range(2)), key=lambda pair: pair[1] / pair[0]
            )

    benchmark.pedantic(run, rounds=1)
    for (num_seqs, shared), (plain, together) in rows.items():
        print(
            f"{heads} {dtype} {num_seqs} x {shared}: plain {plain:.3f} ms, shared {together:.3f} ms, "
            f"{plain / together:.2f}x"
        )
    benchmark.extra_info.update({f"{b}x{s}": ms for (b, s), ms in rows.items()})
    plain, together = rows[32, 2000]
    assert plain / together > (LEAST_GAIN if heads[0] == heads[1] else LEAST)
