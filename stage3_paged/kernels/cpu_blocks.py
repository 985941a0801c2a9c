"""The compiled loops around the CPU kernel: write to slots, copy blocks out, check tables, plan the work.

Layouts as in `cpu_layout.py`: keys `[N, Hkv, D, bs]`, values `[N, Hkv, bs, D]`, or both in lines; numbers go as their
bits.
Tensors come as addresses with a number of their type, `like`.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from common.compiled import LANES, array_at, compiled, widen
from stage3_paged.kernels import cpu_vectors
from stage3_paged.kernels.cpu_vectors import AHEAD, copy_row, itemsize


@njit
def find_bad_slot(slots, num_slots):
    """Return the first token whose slot does not exist, or -1."""
    for t in range(len(slots)):
        if not 0 <= slots[t] < num_slots:
            return t
    return -1


@njit
def store_token(like, word, t, slot, k_at, v_at, rows, keys_at, values_at, sizes):
    """Write K and V of token t, each `[Hkv, D]`, to one slot; arguments as of `store_few`."""
    _, block_size, num_kv_heads, head_size = sizes
    block_bytes = num_kv_heads * block_size * head_size * itemsize(like)
    block, place = slot // block_size * block_bytes, slot % block_size
    k = array_at(k_at + t * rows[0], (num_kv_heads, head_size), like)
    v = array_at(v_at + t * rows[1], (num_kv_heads, head_size), like)
    if len(word) > 0:
        store_in_lines(like, word, k, v, keys_at + block, values_at + block, place, block_size)
        return
    keys = array_at(keys_at + block, (num_kv_heads, head_size, block_size), like)
    values = array_at(values_at + block, (num_kv_heads, block_size, head_size), like)
    for head in range(num_kv_heads):
        for d in range(head_size):
            keys[head, d, place] = k[head, d]
            values[head, place, d] = v[head, d]


@njit
def store_in_lines(like, word, k, v, keys_at, values_at, place, block_size):
    """Write K and V of a token, each `[Hkv, D]`, to a place of a block: of K whole words, of V its share of them."""
    num_kv_heads, head_size = k.shape
    each = len(word)
    k_words = array_at(k.ctypes.data, (num_kv_heads, head_size // each), np.uint32(0))
    keys = array_at(keys_at, (num_kv_heads, block_size // LANES, head_size // each, LANES), np.uint32(0))
    values = array_at(values_at, (num_kv_heads, head_size // LANES, block_size // each, LANES, each), like)
    for head in range(num_kv_heads):
        for i in range(head_size // each):
            keys[head, place // LANES, i, place % LANES] = k_words[head, i]
        for c in range(head_size // LANES):
            for d in range(LANES):
                values[head, c, place // each, d, place % each] = v[head, c * LANES + d]


@compiled(cpu_vectors)
def store_few(like, word, count, slots_at, k_at, v_at, keys_at, values_at, rows, sizes):
    """Write K and V of some tokens to their slots, unless one does not exist.

    Args:
        like: a number as wide as those of K and V.
        word: tuple as long as numbers share a word of a line, see `cpu_layout.numbers_per_word`.
        count: T.
        slots_at: address of the slots, `[T]` int64.
        k_at: address of the new K, `[T, Hkv, D]`.
        v_at: address of the new V, likewise.
        keys_at: address of the cache's K, `[N, Hkv, D, bs]`.
        values_at: address of its V, `[N, Hkv, bs, D]`.
        rows: bytes from one token of the new K to the next, and of V.
        sizes: tuple of N, bs, Hkv, D.

    Returns:
        -1; or, before anything is written, the first token whose slot does not exist.
    """
    slots = array_at(slots_at, (count,), np.int64(0))
    bad = find_bad_slot(slots, sizes[0] * sizes[1])
    if bad < 0:
        for t in range(count):
            store_token(like, word, t, slots[t], k_at, v_at, rows, keys_at, values_at, sizes)
    return bad


@compiled(cpu_vectors, parallel=True)
def store_many(like, word, count, slots_at, k_at, v_at, keys_at, values_at, rows, sizes):
    """The same by all threads, which take longer to start than a few tokens take to write."""
    slots = array_at(slots_at, (count,), np.int64(0))
    bad = find_bad_slot(slots, sizes[0] * sizes[1])
    if bad < 0:
        for t in prange(count):
            store_token(like, word, t, slots[t], k_at, v_at, rows, keys_at, values_at, sizes)
    return bad


@compiled(parallel=True)
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


@compiled()
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


@compiled()
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


@njit
def list_runs(keys_at, values_at, block_bytes, block_tables, block_size, pieces, p, runs):
    """Where do the tokens of a piece lie?  This is all that paging adds.

    Args:
        keys_at: address of K.
        values_at: address of V.
        block_bytes: bytes of a block of either.
        block_tables: `[B, max blocks]`.
        block_size: tokens.
        pieces: `[P, 4]` from `cpu_blocks.plan_pieces`.
        p: which one.
        runs: gets all addresses in the order in which they are read: the blocks of K, the blocks of V, and the
            first blocks of the next piece's K, which are asked for ahead.
    """
    begin, end = pieces[p, 2] // block_size, (pieces[p, 3] - 1) // block_size + 1
    count = end - begin
    for j in range(count):
        block = np.int64(block_tables[pieces[p, 1], begin + j])  # pools of more than 2^31 bytes are ordinary
        runs[j] = keys_at + block * block_bytes
        runs[count + j] = values_at + block * block_bytes
    following = pieces[min(p + 1, len(pieces) - 1)]
    for j in range(AHEAD):
        column = min(following[2] // block_size + j, (following[3] - 1) // block_size)
        runs[2 * count + j] = keys_at + np.int64(block_tables[following[1], column]) * block_bytes


@njit
def count_tokens(pieces):
    """Positions in all pieces together."""
    total = 0
    for p in range(len(pieces)):
        total += pieces[p, 3] - pieces[p, 2]
    return total


@njit
def load_query(like, word, q_at, q_row, row, query):
    """Copy one row of q `[T, Hq, D]` into query, flat `[Hq, D]`: widened, but where pairs are multiplied."""
    if len(word) == 2:
        copy_row(q_at + row * q_row, query.ctypes.data, len(query) * 2)  # whole lines
    else:
        stored = array_at(q_at + row * q_row, query.shape, like)
        for d in range(len(query)):
            query[d] = widen(stored[d])
