"""How fast the CPU kernel is, beside what it is held to: the memory, and torch's attention.

Every number is a ratio of medians of runs that took turns, since a machine may slow down by half within
minutes.  A noisy machine gets several attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
import torch.nn.functional as F

from stage3_paged.kernels import cpu

pytestmark = [pytest.mark.slow, pytest.mark.timing]

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 30, 9, 3, 64, 16  # the default model's
SEQS, CONTEXT = 32, 320
ATTEMPTS = 6
LEAST_SHARE = 0.4  # of the read bandwidth; what a shared machine leaves of it at worst
DTYPES = (torch.bfloat16, torch.float32)

Measured = dict[str, float]


def take_turns(functions: dict[str, Callable[[], object]], rounds: int) -> Measured:
    """Median seconds of each function, called one after the other for some rounds, the first not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begin)
    return {name: median(own[1:]) for name, own in seconds.items()}


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, dtype=torch.float32).to(dtype)


class Decodes:
    """One decode step of 32 sequences through all layers, so that K and V come from memory."""

    def __init__(self, dtype: torch.dtype, num_seqs: int = SEQS, context: int = CONTEXT) -> None:
        self.context, num_blocks = context, context // BLOCK_SIZE
        pool = num_seqs * num_blocks
        shape = (pool, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        self.paged = [cpu.make_cache(*shape, dtype, "cpu") for _ in range(LAYERS)]
        self.plain = [(draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)) for _ in range(LAYERS)]
        slots = torch.arange(pool * BLOCK_SIZE)
        for paged, plain in zip(self.paged, self.plain, strict=True):
            cpu.store_kv(*(its.flatten(0, 1) for its in plain), *paged, slots)
        self.tables = torch.randperm(pool).view(num_seqs, num_blocks).int()  # [B, max blocks]
        self.query_start = torch.arange(num_seqs + 1, dtype=torch.int32)  # [B + 1]
        self.seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)  # [B]
        self.query_lens, self.context_lens = [1] * num_seqs, [context] * num_seqs
        self.q = draw(num_seqs, HEADS, HEAD_SIZE, dtype=dtype)  # [T, Hq, D]
        self.bytes = 2 * LAYERS * self.plain[0][0].nbytes

    def kernel(self) -> torch.Tensor:
        """Through the kernel, all layers; the last one's output `[T, Hq, D]`."""
        for k_cache, v_cache in self.paged:
            out = cpu.paged_attention(
                self.q,
                k_cache,
                v_cache,
                self.tables,
                self.query_start,
                self.seq_lens,
                HEAD_SIZE**-0.5,
                query_lens=self.query_lens,
                context_lens=self.context_lens,
            )
        return out

    def index_select(self) -> torch.Tensor:
        """Collect whole blocks, then torch's attention; the last layer's output `[T, Hq, D]`."""
        num_seqs = len(self.q)
        order = self.tables.view(-1)
        q = self.q.view(num_seqs, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE)  # [B, Hkv, G, D]
        for caches in self.plain:
            k, v = (
                cache.index_select(0, order).view(num_seqs, self.context, KV_HEADS, HEAD_SIZE).transpose(1, 2)
                for cache in caches
            )  # each [B, Hkv, S, D]
            out = F.scaled_dot_product_attention(q, k, v)  # [B, Hkv, G, D]
        return out.view(self.q.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_reads_at_the_speed_of_memory(dtype: torch.dtype, benchmark: Callable) -> None:
    """At most 0.7 of the time of index_select + attention, and a share of the read bandwidth.

    The goal is 60 % of it.  Where this was written, memory reads either 30 to 36 GB/s or 45 to 64, changing within
    seconds.  At the lower speed a call gets 72 % (bfloat16) and 85 % (float32), at the higher about half: with K
    and V in cache it still takes 0.2 ms, and blocks that lie anywhere are not read as fast as one long piece.  So
    the bound below is what holds in both; it keeps what is reached from getting lost.
    """
    decodes = Decodes(dtype)
    memory = torch.ones(64 << 20)  # 256 MB of float32
    assert (decodes.kernel() - decodes.index_select()).abs().max() < 0.02  # the same work

    def measure() -> Measured:
        functions = {
            "kernel": decodes.kernel,
            "index_select": decodes.index_select,
            "sum": memory.sum,
            "max": memory.view(torch.int64).max,  # sometimes the faster reader
        }
        seconds = take_turns(functions, rounds=7)
        bandwidth = memory.nbytes / min(seconds["sum"], seconds["max"])
        return {
            "kernel_ms": seconds["kernel"] / LAYERS * 1e3,
            "index_select_ms": seconds["index_select"] / LAYERS * 1e3,
            "kernel_gb_per_s": decodes.bytes / seconds["kernel"] / 1e9,
            "memory_gb_per_s": bandwidth / 1e9,
            "share_of_bandwidth": decodes.bytes / seconds["kernel"] / bandwidth,
            "time_to_index_select": seconds["kernel"] / seconds["index_select"],
        }

    def passes(m: Measured) -> bool:
        return m["share_of_bandwidth"] >= LEAST_SHARE and m["time_to_index_select"] <= 0.7

    best_attempt(benchmark, measure, passes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_queries", "length"), [(512, 512), (2048, 2048), (256, 1280)])
def test_prompts_cost_little_more_than_dense(
    num_queries: int, length: int, dtype: torch.dtype, benchmark: Callable
) -> None:
    """A whole prompt, or a chunk with history: at most 1.2 times torch's attention on K and V in one piece.

    With 512-bit vectors it takes 0.4 to 0.5 (bfloat16) and 0.6 to 0.95 of it (float32), from 512 tokens on.
    """
    num_blocks = length // BLOCK_SIZE
    k_cache, v_cache = cpu.make_cache(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, dtype, "cpu")
    table = torch.randperm(num_blocks).int()[None]  # [1, blocks]
    position = torch.arange(length)
    slots = table[0].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE  # [S]
    k, v = (draw(length, KV_HEADS, HEAD_SIZE, dtype=dtype) for _ in "kv")
    q = draw(num_queries, HEADS, HEAD_SIZE, dtype=dtype)
    cpu.store_kv(k, v, k_cache, v_cache, slots)
    start, lens = torch.tensor([0, num_queries]).int(), torch.tensor([length]).int()
    dense_q, dense_k, dense_v = (x.transpose(0, 1).contiguous()[None] for x in (q, k, v))  # [1, H, S, D]
    mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)  # [Tq, S]
    whole = num_queries == length

    def kernel() -> torch.Tensor:
        return cpu.paged_attention(q, k_cache, v_cache, table, start, lens, HEAD_SIZE**-0.5)

    def dense() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            dense_q, dense_k, dense_v, None if whole else mask, is_causal=whole, enable_gqa=True
        )

    assert (kernel() - dense()[0].transpose(0, 1)).abs().max() < 0.02  # the same work

    def measure() -> Measured:
        seconds = take_turns({"kernel": kernel, "dense": dense}, rounds=9)
        milliseconds = {f"{name}_ms": own * 1e3 for name, own in seconds.items()}
        return {**milliseconds, "time_to_dense": seconds["kernel"] / seconds["dense"]}

    best_attempt(benchmark, measure, lambda m: m["time_to_dense"] <= 1.2)


def test_one_long_context_uses_all_cores(benchmark: Callable) -> None:
    """KNOWN_FAULTS B61's path, timed: one sequence of 4,096 is cut into pieces, which the threads share."""
    threads = torch.get_num_threads()
    if threads < 2:
        pytest.skip("needs two cores")
    decodes = Decodes(torch.float32, num_seqs=1, context=4096)

    def on(count: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(count)
            decodes.kernel()

        return run

    def measure() -> Measured:
        seconds = take_turns({"one": on(1), "all": on(threads)}, rounds=9)
        return {"speedup": seconds["one"] / seconds["all"]}

    try:
        best_attempt(benchmark, measure, lambda m: m["speedup"] > 1.3)
    finally:
        torch.set_num_threads(threads)


def best_attempt(benchmark: Callable, measure: Callable[[], Measured], passes: Callable) -> None:
    """Measure several times, until it passes; report every attempt when none does."""
    attempts: list[Measured] = []

    def attempt() -> None:
        while len(attempts) < ATTEMPTS and not (attempts and passes(attempts[-1])):
            attempts.append(measure())

    benchmark.pedantic(attempt, rounds=1)
    benchmark.extra_info.update(attempts[-1])
    rows = [", ".join(f"{name} {value:.3g}" for name, value in m.items()) for m in attempts]
    print(*rows, sep="\n")
    assert passes(attempts[-1]), "; ".join(rows)
