"""How the CPU kernel's blocks lie in memory, so that both products of attention add up whole vectors.

The caches are seen as `[N, bs, Hkv, D]` like those of `reference.py`, but the tokens of a block lie innermost in K:

    K    [N, Hkv, D, bs]    q[d] * K[d, some tokens]
    V    [N, Hkv, bs, D]    weight[t] * V[t, some dimensions]       and no sum across a vector

Where the processor has 512-bit vectors, a block is made of *lines* of 64 bytes, in the order in which they are read,
like the weights of `common/model/tiled_linear.py`: sixteen words, each one float32 or two neighbours of what is summed
over in bfloat16, which one instruction multiplies and adds.

    K    [N, Hkv, bs / 16, D / w, 16, w]    w dimensions of 16 tokens, w numbers per word
    V    [N, Hkv, D / 16, bs / w, 16, w]    w tokens in 16 dimensions

Their tensors look the same, since a block is still a block, to copy or to free; but a number's place within it only
`gather` and the compiled code know.
"""

from __future__ import annotations

import torch

from common.compiled import LANES, WORD
from common.errors import InvalidValue
from common.model.tiled_linear import instructions
from common.pages import pages
from stage3_paged.kernels.checks import Layout, check_block_size


def numbers_per_word(dtype: torch.dtype, block_size: int, head_size: int) -> int:
    """Numbers in a word of a line, if blocks of this kind are made of lines on this processor; else 0."""
    whole = block_size % LANES == 0 and head_size % LANES == 0
    return WORD // dtype.itemsize if whole and dtype in instructions() else 0


def word_of(cache: Layout) -> tuple[int, ...]:
    """The same of a cache `[N, bs, Hkv, D]`, as a tuple so long: compiled code knows that by its type."""
    _, block_size, _, head_size = cache.shape
    return (0,) * numbers_per_word(cache.dtype, block_size, head_size)


def make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, seen as `[N, bs, Hkv, D]`; what a slot holds before its first write is undefined."""
    check_block_size(block_size)
    k_shape = num_blocks, num_kv_heads, head_size, block_size
    v_shape = num_blocks, num_kv_heads, block_size, head_size
    if torch.device(device).type == "cpu":
        k, v = pages(*k_shape, dtype=dtype), pages(*v_shape, dtype=dtype)
    else:  # "meta", to see the layout
        k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in (k_shape, v_shape))
    return k.permute(0, 3, 1, 2), v.permute(0, 2, 1, 3)  # both [N, bs, Hkv, D]


def gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read slots `[n]` of one of the caches back: `[n, Hkv, D]`."""
    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    block, offset = slots // block_size, slots % block_size  # [n], [n]
    word = numbers_per_word(cache.dtype, block_size, head_size)
    if word == 0:
        return cache[block, offset]  # [n, Hkv, D]
    shape = num_blocks, num_kv_heads, -1
    if cache.stride(1) == 1:  # K, whose tokens lie innermost
        lines = cache.permute(0, 2, 3, 1).view(
            *shape, head_size // word, LANES, word
        )  # [N, Hkv, bs / 16, D / w, 16, w]
        return lines[block, :, offset // LANES, :, offset % LANES].flatten(2)  # [n, Hkv, D]
    lines = cache.permute(0, 2, 1, 3).view(
        *shape, block_size // word, LANES, word
    )  # [N, Hkv, D / 16, bs / w, 16, w]
    return lines[block, :, :, offset // word, :, offset % word].flatten(2)  # [n, Hkv, D]


def check_cache_layout(k_cache: Layout, v_cache: Layout) -> None:
    """Refuse caches that are not as `make_cache` makes them: they go as addresses from here on."""
    num_blocks, block_size, num_kv_heads, head_size = v_cache.shape
    k, v = make_cache(num_blocks, block_size, num_kv_heads, head_size, v_cache.dtype, "meta")
    found, wanted = (*k_cache[1:], v_cache.stride), (k.dtype, k.shape, k.stride(), v.stride())
    if found != wanted or k_cache.device != v_cache.device:
        raise InvalidValue("k_cache", found[:3], f"what make_cache returns beside {v_cache.dtype} V")
