"""The device side of the Triton kernels: what one program on the GPU does.  `triton.py` launches them.

Read `paged_attention_simple_kernel` first: it is the whole idea, one query token and one head per program.
`paged_attention_tile_kernel` is the same loop over a tile of queries that share a key head, so that the two
products become matrix products, and `merge_splits_kernel` joins the parts of a context that several programs
read at the same time.

Letters as in `common/batch.py`; besides:

    G     query heads of a group (Hq / Hkv), all reading the same K/V
    ROWS  rows of a query tile: ROWS // G query tokens, each with the G heads of the group
    KEYS  positions read in one step of the loop
    DP    head size rounded up to a power of two, as `tl.arange` needs; the lanes from D on are masked

Block numbers are widened to 64 bits before they are multiplied: block 131,072 of 16 tokens x 8 heads x 128
begins at element 2^31, one more than 32 bits can count.  Every load of K and V is masked with `other=0`: the
rest of the last block may hold anything, and zero times NaN is NaN.

Sources: PagedAttention (Kwon et al., SOSP 2023, section 4.3); online softmax and tiles as in FlashAttention
(Dao et al., 2022), splits of the context as in Flash-Decoding (Dao et al., 2023).
"""

# ruff: noqa: PLR0913, PLR0917 (a kernel takes its pointers, strides and constants one by one)
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
"""Softmax runs on powers of 2 here; its logarithms leave as natural ones."""


@triton.jit
def store_kv_kernel(
    k_ptr,  # [T, Hkv, D]
    v_ptr,  # [T, Hkv, D]
    k_cache_ptr,  # [N, bs, Hkv, D]
    v_cache_ptr,  # [N, bs, Hkv, D]
    slot_ptr,  # [T] int64
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_slot,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HP: tl.constexpr,
    DP: tl.constexpr,
):
    """Program t copies K and V of token t into slot `slot_ptr[t]`; a negative slot stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)  # scalar int64
    if slot < 0:
        return
    head = tl.arange(0, HP)[:, None]  # [HP, 1]
    lane = tl.arange(0, DP)[None, :]  # [1, DP]
    mask = (head < NUM_HEADS) & (lane < HEAD_SIZE)  # [HP, DP]
    k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + lane, mask=mask)  # [HP, DP]
    v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + lane, mask=mask)  # [HP, DP]
    start = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot  # scalar int64
    target = start + head * stride_head + lane  # [HP, DP] int64
    tl.store(k_cache_ptr + target, k, mask=mask)
    tl.store(v_cache_ptr + target, v, mask=mask)


@triton.jit
def paged_attention_simple_kernel(
    out_ptr,  # [T, Hq, D]
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [N, bs, Hkv, D]
    v_cache_ptr,  # [N, bs, Hkv, D]
    block_tables_ptr,  # [B, max blocks] int32
    query_start_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    scale_log2,
    stride_out_token,
    stride_out_head,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    G: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DP: tl.constexpr,
):
    """Program (i, b, h): query token i of sequence b, query head h, over the sequence block by block."""
    i, b, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = (tl.load(query_start_ptr + b) + i).to(tl.int64)
    query_end = tl.load(query_start_ptr + b + 1)
    if token >= query_end:
        return
    own = tl.load(seq_lens_ptr + b) - query_end + token  # the query's own position
    first = 0 if WINDOW == 0 else tl.maximum(own - WINDOW + 1, 0)  # the oldest position it sees
    lane = tl.arange(0, DP)  # [DP]
    in_head = lane < HEAD_SIZE  # [DP]
    q_row = q_ptr + token * stride_q_token + h * stride_q_head
    q = tl.load(q_row + lane, mask=in_head, other=0).to(tl.float32) * scale_log2  # [DP]
    running_max = -float("inf")
    total = 0.0
    acc = tl.zeros([DP], dtype=tl.float32)  # [DP]
    for start in range(first // BLOCK_SIZE * BLOCK_SIZE, own + 1, BLOCK_SIZE):
        # block_table[position // block_size]: here memory is paged, all else is attention.
        block = tl.load(block_tables_ptr + b * stride_table + start // BLOCK_SIZE)  # scalar
        offset = tl.arange(0, BLOCK_SIZE)  # [bs]
        seen = (start + offset <= own) & (start + offset >= first)  # [bs]
        source = block.to(tl.int64) * stride_block + offset * stride_slot + h // G * stride_head  # [bs]
        tile = source[:, None] + lane[None, :]  # [bs, DP]
        mask = seen[:, None] & in_head[None, :]  # [bs, DP]
        k = tl.load(k_cache_ptr + tile, mask=mask, other=0).to(tl.float32)  # [bs, DP]
        v = tl.load(v_cache_ptr + tile, mask=mask, other=0).to(tl.float32)  # [bs, DP]
        scores = tl.where(seen, tl.sum(q[None, :] * k, axis=1), -float("inf"))  # [bs]
        new_max = tl.maximum(running_max, tl.max(scores, axis=0))  # finite: something is seen in each block
        weights = tl.exp2(scores - new_max)  # [bs]
        shrink = tl.exp2(running_max - new_max)
        acc = acc * shrink + tl.sum(weights[:, None] * v, axis=0)  # [DP]
        total = total * shrink + tl.sum(weights, axis=0)
        running_max = new_max
    out_row = out_ptr + token * stride_out_token + h * stride_out_head
    tl.store(out_row + lane, acc / total, mask=in_head)


@triton.jit
def paged_attention_tile_kernel(
    out_ptr,  # [splits, T, Hq, D]
    lse_ptr,  # [splits, T, Hq] float32, logarithm of each split's softmax sum; or None
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [N, bs, Hkv, D]
    v_cache_ptr,  # [N, bs, Hkv, D]
    block_tables_ptr,  # [B, max blocks] int32
    query_start_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    scale_log2,
    num_tokens,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    G: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (tile and split, kv head, b): ROWS // G query tokens x G heads over a split of the context."""
    split, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    kv_head, b = tl.program_id(1), tl.program_id(2)
    query_begin = tl.load(query_start_ptr + b)
    num_queries = tl.load(query_start_ptr + b + 1) - query_begin
    first_query = tile * (ROWS // G)
    if first_query >= num_queries:
        return
    row = tl.arange(0, ROWS)  # [ROWS]
    query = first_query + row // G  # [ROWS], which query token of the sequence
    live = (row < ROWS // G * G) & (query < num_queries)  # [ROWS]
    token = (query_begin + query).to(tl.int64)  # [ROWS]
    head = kv_head * G + row % G  # [ROWS]
    lane = tl.arange(0, DP)  # [DP]
    in_head = lane < HEAD_SIZE  # [DP]
    tile_mask = live[:, None] & in_head[None, :]  # [ROWS, DP]
    source = token * stride_q_token + head * stride_q_head  # [ROWS]
    q = tl.load(q_ptr + source[:, None] + lane[None, :], mask=tile_mask, other=0)  # [ROWS, DP]
    before = tl.load(seq_lens_ptr + b) - num_queries  # positions before the first query of the sequence
    last_query = tl.minimum(first_query + ROWS // G, num_queries) - 1
    begin, end = split_range(before + first_query, before + last_query, split, WINDOW, SPLITS, KEYS)
    acc, running_max, total = attend_range(
        q.to(tl.float32) if UPCAST else q, before + query, begin, end,
        k_cache_ptr + kv_head * stride_head,
        v_cache_ptr + kv_head * stride_head,
        block_tables_ptr + b * stride_table,
        scale_log2, stride_block, stride_slot, HEAD_SIZE, BLOCK_SIZE, WINDOW, KEYS,
    )  # fmt: skip
    total_safe = tl.where(total == 0, 1.0, total)  # [ROWS], an empty split has the sum 0
    target = split * stride_out_split + token * stride_out_token + head * stride_out_head  # [ROWS]
    tl.store(out_ptr + target[:, None] + lane[None, :], acc / total_safe[:, None], mask=tile_mask)
    if lse_ptr is not None:
        num_heads = tl.num_programs(1) * G
        lse = (running_max + tl.log2(total_safe)) * LN_2  # [ROWS], -inf for an empty split
        tl.store(lse_ptr + (split * num_tokens + token) * num_heads + head, lse, mask=live)


@triton.jit
def split_range(
    first_position, last_position, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr
):
    """Positions `[begin, end)` that a split reads for queries at these positions; empty if begin >= end."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)  # nobody in the tile sees further back
    end = last_position + 1  # nobody in the tile sees further on
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, SPLITS), KEYS) * KEYS
        begin = begin + split * share
        end = tl.minimum(begin + share, end)
    return begin, end


@triton.jit
def attend_range(
    q,  # [ROWS, DP]
    row_position,  # [ROWS], position of each row's query
    begin,
    end,
    k_head_ptr,  # [N, bs, D] of one key head
    v_head_ptr,  # [N, bs, D] of one key head
    block_table,  # [max blocks] int32 of one sequence
    scale_log2,
    stride_block,
    stride_slot,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend over positions `[begin, end)`: the sum of weighted values, and each row's maximum and sum."""
    ROWS: tl.constexpr = q.shape[0]
    DP: tl.constexpr = q.shape[1]
    lane = tl.arange(0, DP)  # [DP]
    in_head = lane < HEAD_SIZE  # [DP]
    acc = tl.zeros([ROWS, DP], dtype=tl.float32)  # [ROWS, DP]
    running_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)  # [ROWS]
    total = tl.zeros([ROWS], dtype=tl.float32)  # [ROWS]
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)  # [KEYS]
        inside = position < end  # [KEYS]
        # block_table[position // block_size], for each position of the step
        block = tl.load(block_table + position // BLOCK_SIZE, mask=inside, other=0)  # [KEYS]
        source = block.to(tl.int64) * stride_block + position % BLOCK_SIZE * stride_slot  # [KEYS] int64
        k_mask = in_head[:, None] & inside[None, :]  # [DP, KEYS]
        k = tl.load(k_head_ptr + source[None, :] + lane[:, None], mask=k_mask, other=0)  # [DP, KEYS]
        v_mask = inside[:, None] & in_head[None, :]  # [KEYS, DP]
        v = tl.load(v_head_ptr + source[:, None] + lane[None, :], mask=v_mask, other=0)  # [KEYS, DP]
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2  # [ROWS, KEYS]
        seen = inside[None, :] & (position[None, :] <= row_position[:, None])  # [ROWS, KEYS]
        if WINDOW > 0:
            seen = seen & (position[None, :] > row_position[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))  # [ROWS, KEYS]
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [ROWS]
        # A row that has seen nothing yet has the maximum -inf, and -inf minus -inf is NaN: subtract 0 there.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # [ROWS]
        weights = tl.exp2(scores - shift[:, None])  # [ROWS, KEYS]
        shrink = tl.exp2(running_max - shift)  # [ROWS]
        total = total * shrink + tl.sum(weights, axis=1)  # [ROWS]
        acc = tl.dot(
            weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee"
        )  # [ROWS, DP]
        running_max = new_max
    return acc, running_max, total


@triton.jit
def merge_splits_kernel(
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] float32, or None
    partial_ptr,  # [splits, T, Hq, D] float32
    partial_lse_ptr,  # [splits, T, Hq] float32
    stride_out_token,
    stride_out_head,
    HEAD_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    DP: tl.constexpr,
):
    """Program (t, h): the parts of one query weighted by their share of the whole softmax sum."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_tokens, num_heads = tl.num_programs(0), tl.num_programs(1)
    split = tl.arange(0, SPLITS)  # [SPLITS]
    lane = tl.arange(0, DP)  # [DP]
    in_head = lane < HEAD_SIZE  # [DP]
    part = (split * num_tokens + token) * num_heads + head  # [SPLITS] int64
    lse = tl.load(partial_lse_ptr + part)  # [SPLITS], -inf for an empty split
    largest = tl.max(lse, axis=0)
    # All splits are empty for a row that stands for no token: the sum 0 is then divided by 1.
    weights = tl.exp(lse - tl.where(largest == -float("inf"), 0.0, largest))  # [SPLITS], 0 for an empty one
    values = tl.load(
        partial_ptr + part[:, None] * HEAD_SIZE + lane[None, :], mask=in_head[None, :], other=0
    )  # [SPLITS, DP]
    total = tl.sum(weights, axis=0)
    merged = tl.sum(weights[:, None] * values, axis=0) / tl.where(total == 0, 1.0, total)  # [DP]
    tl.store(out_ptr + token * stride_out_token + head * stride_out_head + lane, merged, mask=in_head)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * num_heads + head, largest + tl.log(total))
