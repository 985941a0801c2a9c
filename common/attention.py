"""Causal attention of one sequence over K/V that lies in one piece, in plain torch.

This is what attention means here; every faster or paged version must agree with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attend with the last `Tq` positions of a sequence over all of its `S` positions.

    Args:
        q: `[Tq, Hq, D]`, the queries of positions `S - Tq ... S - 1`.
        k: `[S, Hkv, D]`; `Hq` is a multiple of `Hkv`, and query heads `g * Hq/Hkv ...` share key head g.
        v: `[S, Hkv, D]`.
        scale: factor on the scores, usually `D ** -0.5`.
        window: see only this many latest positions, itself included (sliding-window layers).

    Returns:
        `[Tq, Hq, D]`.
    """
    num_q, num_heads, head_size = q.shape
    length, num_kv_heads, _ = k.shape
    if window is not None and length > window + num_q - 1:
        # The first query sees back to S - Tq - window + 1; whatever lies before is nobody's.
        k, v = k[length - num_q - window + 1 :], v[length - num_q - window + 1 :]
        length = k.shape[0]
    k = k.transpose(0, 1)  # [Hkv, S, D]
    v = v.transpose(0, 1)  # [Hkv, S, D]
    if num_q == 1:
        # One query sees every key, so the heads of a group can be the rows of one small matrix.
        grouped = q.view(num_kv_heads, -1, head_size)  # [Hkv, Hq/Hkv, D]
        out = F.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)  # [1, Hkv, G, D]
        return out.view(1, num_heads, head_size)  # [1, Hq, D]
    mask = None
    if window is not None or length != num_q:
        rows = torch.arange(length - num_q, length, device=q.device)[:, None]  # [Tq, 1]
        columns = torch.arange(length, device=q.device)[None, :]  # [1, S]
        mask = columns <= rows  # [Tq, S]
        if window is not None:
            mask &= columns > rows - window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # [1, Hq, Tq, D]
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )  # [1, Hq, Tq, D]
    return out[0].transpose(0, 1)  # [Tq, Hq, D]
