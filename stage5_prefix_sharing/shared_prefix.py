"""Attention that reads a shared prefix once for all who share it, instead of once for each.

Decodes a, b and c begin with the same 60 blocks, d shares nothing:

    prefix    the queries of a, b and c together over the 60 blocks      -> out, lse \\  joined into
    suffix    the query of each over the blocks that follow              -> out, lse /   their output
    rest      the query of d over all of its blocks, as ever             -> its output

Joining is exact.  A softmax over a whole context is the average of the softmaxes over its two parts, weighted
by the sums that they divided by; `lse` is the logarithm of such a sum.

All queries see all of the prefix, so nothing is masked there, and then it makes no difference to attention
whether two rows are heads of one token or tokens of two sequences.  So the queries of several sequences, a
*tile*, go to the kernel as a single token that has the heads of all of them, and no kernel had to change.

Sums are made in another order than without, so results differ by rounding, as they do for other batch shapes.

Sources: Hydragen (Juravsky et al., 2024); cascade attention in FlashInfer (Ye et al., 2024) and vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from common.batch import ForwardBatch, staged
from common.protocol import Model
from stage3_paged.kernels import Kernel
from stage5_prefix_sharing.prefix_groups import Group, find_groups

LEAST_SAVED: dict[str, dict[float, float]] = {
    "cpu": {1: 150_000, 2: 500_000, math.inf: math.inf},
    "cuda": {math.inf: 5_000_000},
}
NEVER = {math.inf: math.inf}
"""For up to so many query heads per key head: query heads x tokens to be saved for a group to be worth it.

CPU: measured, by tests/benchmarks/test_shared_prefix_speed.py (two cores).  Plain calls find the shared blocks in
the processor's caches from the second sequence on, so arithmetic is what takes time, and sharing only saves
loads: a vector of K or V serves 8 queries at once instead of the heads of a group.  32 sequences with 2,000
shared tokens: 1.9 times as fast in float32 and 1.5 times in bfloat16 for one head per group, 1.2 times and 0.97
for two; from three on it loses (0.9 and 0.8), at any size.  GPU: an estimate, not measured, of what some ten
launches per layer and a decode without its CUDA graph cost.
"""


@dataclass(frozen=True)
class SharingRule:
    """When and how prefixes are read together, for one model on one device.

    Attributes:
        num_heads: Hq.
        num_kv_heads: Hkv.
        block_size: tokens per block.
        tile: queries that go to the kernel as one token.
        least_saved: how many reads of a block a group must save; infinite for never, 1 for always.
        device: where the model is.
    """

    num_heads: int
    num_kv_heads: int
    block_size: int
    tile: int
    least_saved: float
    device: torch.device

    @classmethod
    def of(cls, model: Model, block_size: int) -> SharingRule:
        """The rule that pays, by `LEAST_SAVED`; a model that only has layers with a window never shares."""
        shape, kind = model.config, model.device.type
        group = shape.num_heads // shape.num_kv_heads  # G
        if kind == "cpu":
            tile = 8  # rows of the vector code's highest tile
        else:
            # Rows of the Triton kernel's tile, which holds all heads that share a key head.
            small = model.dtype == torch.float32 or shape.head_dim > 128
            tile = max(1, (16 if small else 128) // group)
        least = next(least for largest, least in LEAST_SAVED.get(kind, NEVER).items() if group <= largest)
        windows = shape.sliding_windows
        return cls(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            block_size=block_size,
            tile=tile,
            least_saved=math.inf if windows and None not in windows else least / shape.num_heads / block_size,
            device=model.device,
        )

    def put(self, array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Copy an array to the device without waiting for it."""
        return staged(torch.from_numpy(array).to(dtype), self.device).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Part:
    """The batch of one call of a kernel, as `ForwardBatch` names its arrays."""

    block_tables: torch.Tensor  # [B, max blocks] int32
    query_start: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32
    query_lens: list[int]
    context_lens: list[int]

    @classmethod
    def pack(cls, tables: np.ndarray, query: np.ndarray, context: np.ndarray, rule: SharingRule) -> Part:
        """From tables `[B, max blocks]` and lengths `[B]`."""
        return cls(
            block_tables=rule.put(np.ascontiguousarray(tables), torch.int32),
            query_start=rule.put(np.cumsum([0, *query]), torch.int32),
            seq_lens=rule.put(context, torch.int32),
            query_lens=query.tolist(),
            context_lens=context.tolist(),
        )


@dataclass(frozen=True)
class SharedPrefix:
    """How one forward attends.  n sequences share, each with one row of q; `rest` has all other rows.

    A tile's row is a pair of sequence and head.  A last tile that is not full repeats a sequence.
    """

    rows: torch.Tensor  # [n] int64, rows of q
    suffix: Part  # n sequences without their prefix
    tiles: torch.Tensor  # [tiles, tile * Hq] int64, pairs out of n * Hq
    prefix: Part  # one sequence per tile
    places: torch.Tensor  # [n, Hq] int64, where each pair is among those of the tiles
    rest_rows: torch.Tensor  # [T - n] int64, rows of q
    rest: Part | None


def plan_sharing(batch: ForwardBatch, rule: SharingRule) -> SharedPrefix | None:
    """Decide, once per forward, which decodes read which blocks together.

    Args:
        batch: on the host, its block tables laid out.
        rule: says what is worth it.

    Returns:
        The plan, its arrays on the rule's device; or None where nothing is worth it.
    """
    query, context = np.array(batch.query_lens), np.array(batch.context_lens)  # [B], [B]
    tables, start = batch.block_tables.numpy(), batch.query_start.numpy()
    decodes = np.flatnonzero(query == 1)  # [decodes]
    # The block that a query is in has not been full before, so it is nobody else's: no suffix is empty.
    groups = find_groups(tables[decodes], (context[decodes] - 1) // rule.block_size, rule.least_saved)
    if not groups:
        return None
    groups = [(decodes[own], blocks) for own, blocks in groups]
    seqs = np.concatenate([own for own, _ in groups])  # [n]
    skipped = np.repeat([blocks for _, blocks in groups], [len(own) for own, _ in groups])  # [n]
    own_lens = context[seqs] - skipped * rule.block_size  # [n]
    column = skipped[:, None] + np.arange(-(-own_lens.max() // rule.block_size))  # [n, most own blocks]
    own_tables = tables[seqs[:, None], column.clip(max=tables.shape[1] - 1)]  # [n, most own blocks]
    tiles, places, prefix = _pack_tiles(groups, tables, rule)
    others = np.setdiff1d(np.arange(len(query)), seqs)  # [B - n]
    rest_rows = np.setdiff1d(np.arange(start[-1]), start[seqs])  # [T - n]
    return SharedPrefix(
        rows=rule.put(start[seqs], torch.int64),
        suffix=Part.pack(own_tables, query[seqs], own_lens, rule),
        tiles=rule.put(tiles, torch.int64),
        prefix=prefix,
        places=rule.put(places, torch.int64),
        rest_rows=rule.put(rest_rows, torch.int64),
        rest=Part.pack(tables[others], query[others], context[others], rule) if len(rest_rows) else None,
    )


def _pack_tiles(
    groups: list[Group], tables: np.ndarray, rule: SharingRule
) -> tuple[np.ndarray, np.ndarray, Part]:
    """Fill tiles with the queries of each group: `tiles`, `places` and `prefix` of `SharedPrefix`."""
    owners: list[np.ndarray] = []  # of each group [its tiles, tile], numbers below n
    for own, _ in groups:
        first = sum(len(before) for before, _ in groups[: len(owners)])
        padded = np.pad(np.arange(first, first + len(own)), (0, -len(own) % rule.tile), mode="edge")
        owners.append(padded.reshape(-1, rule.tile))
    owner = np.concatenate(owners)  # [tiles, tile]
    # As the kernel wants it, the heads of one key head side by side.
    head = np.arange(rule.num_heads).reshape(rule.num_kv_heads, 1, -1)  # [Hkv, 1, G]
    tiles = (owner[:, None, :, None] * rule.num_heads + head).reshape(len(owner), -1)  # [tiles, tile * Hq]
    places = np.empty((owner.max() + 1) * rule.num_heads, dtype=np.int64)  # [n * Hq]
    places[tiles.ravel()] = np.arange(tiles.size)  # of a pair that comes twice, either will do
    seqs = np.concatenate([own for own, _ in groups])  # [n]
    blocks = np.repeat([count for _, count in groups], [len(own) for own in owners])  # [tiles]
    prefix_tables = tables[seqs[owner[:, 0]], : blocks.max()]  # [tiles, most shared blocks]
    prefix = Part.pack(prefix_tables, np.ones_like(blocks), blocks * rule.block_size, rule)
    return tiles, places.reshape(-1, rule.num_heads), prefix


def attend_shared(
    kernel: Kernel,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    plan: SharedPrefix,
    scale: float,
) -> torch.Tensor:
    """What `kernel.paged_attention` gives for the whole batch, by the plan; for layers without a window.

    Args:
        kernel: computes each part.
        q: `[T, Hq, D]`, its K and V stored already.
        caches: K and V of the layer.
        plan: made for this batch.
        scale: factor on the scores.

    Returns:
        `[T, Hq, D]`.
    """
    own_q = q[plan.rows]  # [n, Hq, D]
    tiled_q = own_q.flatten(0, 1)[plan.tiles]  # [tiles, tile * Hq, D]
    wide = torch.promote_types(q.dtype, torch.float32)
    suffix_lse = torch.empty(own_q.shape[:2], dtype=wide, device=q.device)  # [n, Hq]
    tiled_lse = torch.empty(tiled_q.shape[:2], dtype=wide, device=q.device)  # [tiles, tile * Hq]
    suffix = _attend(kernel, own_q, caches, plan.suffix, scale, suffix_lse)  # [n, Hq, D]
    tiled = _attend(kernel, tiled_q, caches, plan.prefix, scale, tiled_lse)  # [tiles, tile * Hq, D]
    prefix = tiled.flatten(0, 1)[plan.places]  # [n, Hq, D]
    # e ** prefix_lse / (e ** prefix_lse + e ** suffix_lse), without the overflow
    weight = torch.sigmoid(tiled_lse.flatten()[plan.places] - suffix_lse)[..., None]  # [n, Hq, 1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [T, Hq, D]
    out[plan.rows] = torch.lerp(suffix.to(wide), prefix.to(wide), weight).to(q.dtype)
    if plan.rest is not None:
        out[plan.rest_rows] = _attend(kernel, q[plan.rest_rows], caches, plan.rest, scale)
    return out


def _attend(
    kernel: Kernel,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    part: Part,
    scale: float,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """One part's output, like q, and its `lse` `[T, Hq]`."""
    return kernel.paged_attention(
        q,
        *caches,
        part.block_tables,
        part.query_start,
        part.seq_lens,
        scale,
        query_lens=part.query_lens,
        context_lens=part.context_lens,
        lse=lse,
    )
