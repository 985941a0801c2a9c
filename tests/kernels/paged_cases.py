"""Batches over a poisoned paged cache, and attention written once more in float64 to judge the kernels by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice, product

import numpy as np
import torch

from stage3_paged.kernels import Kernel

BLOCK_SIZES = (8, 16, 32, 64, 256)
HEAD_SIZES = (32, 64, 80, 96, 128, 256)
GROUPS = ((2, 2), (9, 3), (8, 2), (8, 1))  # (Hq, Hkv): 1:1, 3:1, 4:1, 8:1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

NO_BLOCK = 2**31 - 1
"""Stands in the block tables behind a sequence's last block: to follow it is to crash."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest absolute error for values of about 1: half precision also rounds the weights."""


@dataclass(frozen=True)
class KernelUnderTest:
    """A kernel under test."""

    name: str
    module: Kernel
    device: str


@dataclass(frozen=True)
class Case:
    """One batch: `sequences` holds (tokens to attend with, context length) of each."""

    sequences: tuple[tuple[int, int], ...]
    block_size: int = 16
    head_size: int = 64
    heads: tuple[int, int] = (9, 3)
    window: int | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lengths = "-".join(f"{n}of{s}" for n, s in self.sequences)
        heads = f"{self.heads[0]}to{self.heads[1]}"
        return f"bs{self.block_size}-d{self.head_size}-{heads}-w{self.window}-{dtype}-{lengths}"


def batches(bs: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Every kind of batch, with contexts on both sides of a block's edge."""
    return {
        "decode": ((1, 1), (1, bs), (1, bs + 1), (1, 2 * bs - 1)),
        "chunk": ((5, bs + 7), (3, 2 * bs + 1), (bs, bs + 1)),
        "prompt": ((1, 1), (bs - 1, bs - 1), (bs, bs), (bs + 1, bs + 1)),
        "mixed": ((1, bs + 3), (bs + 1, bs + 1), (4, bs + 2), (1, 1)),
    }


def sweep() -> list[Case]:
    """All block sizes x head sizes x groups, and all kinds of batch x dtypes x windows."""
    shapes = [
        Case(batches(bs)[kind], bs, size, heads)
        for kind, (bs, size, heads) in zip(
            cycle([*batches(8), "mixed"]), product(BLOCK_SIZES, HEAD_SIZES, GROUPS), strict=False
        )  # five kinds and four groups: every pair comes up
    ]
    kinds = [
        Case(sequences, 8, 80, (8, 2), window, dtype)
        for sequences, window, dtype in product(batches(8).values(), (None, 5), DTYPES)
    ]
    return shapes + kinds


def thinned() -> list[Case]:
    """For the interpreter: each block size with each head size once, the rest going round beside them."""
    rounds = zip(
        product(BLOCK_SIZES[:-1], HEAD_SIZES),
        cycle(GROUPS),
        cycle([*batches(8), "decode"]),
        cycle((None, 5, None, None, 20, None, 1)),
        cycle(DTYPES),
        strict=False,
    )
    cases = [
        Case(batches(bs)[kind], bs, size, heads, window, dtype)
        for (bs, size), heads, kind, window, dtype in rounds
    ]
    wide = Case(((1, 257), (2, 30)), 256, 32, (2, 1))
    return [*cases, *(replace(wide, head_size=size) for size in islice(HEAD_SIZES, 0, None, 2))]


class Paged:
    """A batch laid out in a paged cache: permuted blocks, every slot that holds no token poisoned."""

    def __init__(
        self, tested: KernelUnderTest, case: Case, poison: float = float("nan"), seed: int = 0
    ) -> None:
        self.case, self.kernel, self.device = case, tested.module, tested.device
        rng = np.random.default_rng(seed)
        num_heads, num_kv_heads = case.heads
        size = case.block_size
        blocks = [-(-length // size) for _, length in case.sequences]
        order = rng.permutation(sum(blocks) + 3)  # three blocks stay free
        self.caches = tested.module.make_cache(
            len(order), size, num_kv_heads, case.head_size, case.dtype, tested.device
        )
        for cache in self.caches:
            cache.fill_(poison)
        tables = np.full((len(blocks), max(blocks) + 1), NO_BLOCK, dtype=np.int32)  # [B, max blocks]
        for row, own in zip(tables, np.split(order, np.cumsum(blocks))[:-1], strict=True):
            row[: len(own)] = own
        self.tables = torch.from_numpy(tables).to(tested.device)
        self.query_lens = [n for n, _ in case.sequences]
        self.context_lens = [s for _, s in case.sequences]
        start = np.cumsum([0, *self.query_lens])
        self.query_start = torch.tensor(start, dtype=torch.int32, device=tested.device)  # [B + 1]
        self.seq_lens = torch.tensor(self.context_lens, dtype=torch.int32, device=tested.device)  # [B]

        def draw(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape)).to(case.dtype).to(tested.device)

        self.q = draw(start[-1], num_heads, case.head_size)  # [T, Hq, D]
        self.k = [draw(s, num_kv_heads, case.head_size) for s in self.context_lens]  # of each [S, Hkv, D]
        self.v = [draw(s, num_kv_heads, case.head_size) for s in self.context_lens]  # of each [S, Hkv, D]
        self.slots = []
        for row, length in zip(tables.astype(np.int64), self.context_lens, strict=True):
            position = np.arange(length)
            slots = row[position // size] * size + position % size  # [S]
            self.slots.append(torch.from_numpy(slots).to(tested.device))
        self.kernel.store_kv(torch.cat(self.k), torch.cat(self.v), *self.caches, torch.cat(self.slots))

    def attend(self, **changed: object) -> torch.Tensor:
        """What the kernel makes of it, or of some other arguments: `[T, Hq, D]`."""
        arguments = {
            "q": self.q,
            "k_cache": self.caches[0],
            "v_cache": self.caches[1],
            "block_tables": self.tables,
            "query_start": self.query_start,
            "seq_lens": self.seq_lens,
            "scale": self.case.head_size**-0.5,
            "window": self.case.window,
            "query_lens": self.query_lens,
            "context_lens": self.context_lens,
        }
        return self.kernel.paged_attention(**{**arguments, **changed})

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The same in float64, one query and one head at a time over K/V in one piece: `[T, Hq, D]`.

        Also the logarithm of the sum of all e ** score: `[T, Hq]`.
        """
        q = self.q.double().cpu().numpy()
        group = self.case.heads[0] // self.case.heads[1]
        out, lse, row = np.empty_like(q), np.empty(q.shape[:2]), 0
        for (num_queries, length), k, v in zip(self.case.sequences, self.k, self.v, strict=True):
            keys, values = k.double().cpu().numpy(), v.double().cpu().numpy()
            for own in range(length - num_queries, length):
                first = 0 if self.case.window is None else max(0, own - self.case.window + 1)
                for head in range(self.case.heads[0]):
                    scores = keys[first : own + 1, head // group] @ q[row, head]  # [seen]
                    scores *= self.case.head_size**-0.5
                    weights = np.exp(scores - scores.max())  # [seen]
                    lse[row, head] = scores.max() + np.log(weights.sum())
                    out[row, head] = weights @ values[first : own + 1, head // group] / weights.sum()
                row += 1
        return out, lse

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Compare a kernel's output, and its `lse` if it was asked for, with the expected one."""
        expected, expected_lse = self.expected()
        assert out.shape == self.q.shape
        assert out.dtype == self.case.dtype
        error = np.abs(out.double().cpu().numpy() - expected).max()
        assert error <= TOLERANCE[self.case.dtype], f"off by {error:.3g}"  # fails for NaN too
        if lse is not None:
            error = np.abs(lse.double().cpu().numpy() - expected_lse).max()
            allowed = max(TOLERANCE[lse.dtype], TOLERANCE[self.case.dtype] / 10)  # no half of it is rounded
            assert error <= allowed, f"lse off by {error:.3g}"
