"""The compiled loops around the CPU kernel: write to slots, copy blocks out, check tables, plan the work.

Layouts as in `cpu.make_cache`: keys `[N, Hkv, D, bs]`, values `[N, Hkv, bs, D]`; numbers go as their bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange


@njit(cache=True, parallel=True)
def store_slots(k, v, keys, values, slots):
    """Write `[T, Hkv, D]` K and V; return the first token whose slot does not exist, or -1."""
    num_blocks, num_kv_heads, block_size, head_size = values.shape
    for t in range(len(slots)):
        if not 0 <= slots[t] < num_blocks * block_size:
            return t
    for t in prange(len(slots)):
        block, offset = slots[t] // block_size, slots[t] % block_size
        for head in range(num_kv_heads):
            for d in range(head_size):
                keys[block, head, d, offset] = k[t, head, d]
                values[block, head, offset, d] = v[t, head, d]
    return -1


@njit(cache=True, parallel=True)
def copy_blocks(keys, values, k, v, block_table, first):
    """Fill k and v, `[Hkv, n, D]`, with the positions from `first` on."""
    num_kv_heads, num_tokens, head_size = k.shape
    block_size = values.shape[2]
    last = first + num_tokens
    for j in prange(first // block_size, (last - 1) // block_size + 1):
        block = block_table[j]
        for head in range(num_kv_heads):
            for position in range(max(first, j * block_size), min(last, (j + 1) * block_size)):
                offset = position - j * block_size
                for d in range(head_size):
                    k[head, position - first, d] = keys[block, head, d, offset]
                    v[head, position - first, d] = values[block, head, offset, d]


@njit(cache=True)
def find_bad_block(block_tables, seq_lens, num_blocks, block_size):
    """Return the first sequence whose context needs a block that is not in its table or in the cache, or -1."""
    for seq in range(len(seq_lens)):
        needed = (seq_lens[seq] + block_size - 1) // block_size
        if needed > block_tables.shape[1]:
            return seq
        for j in range(needed):
            if not 0 <= block_tables[seq, j] < num_blocks:
                return seq
    return -1


@njit(cache=True)
def plan_pieces(query_start, seq_lens, window, longest_query, size):
    """Cut the work of all sequences whose query is at most `longest_query` tokens into pieces.

    Pieces begin at multiples of `size` positions, except the first of a window.

    Returns:
        `[P, 4]` int64: token row, sequence, first position, end; the pieces of a token one after another.
    """
    most = 0
    for seq in range(len(seq_lens)):
        if query_start[seq + 1] - query_start[seq] <= longest_query:
            most += (query_start[seq + 1] - query_start[seq]) * (seq_lens[seq] // size + 1)
    pieces = np.empty((most, 4), dtype=np.int64)
    count = 0
    for seq in range(len(seq_lens)):
        begin, end = np.int64(query_start[seq]), np.int64(query_start[seq + 1])
        if end - begin > longest_query:
            continue
        for row in range(begin, end):
            # Causal: a token sees its own position and those before.
            context = seq_lens[seq] - (end - 1 - row)
            first = max(0, context - window) if window > 0 else 0
            while first < context:
                last = min(context, (first // size + 1) * size)
                pieces[count] = row, seq, first, last
                first = last
                count += 1
    return pieces[:count]
