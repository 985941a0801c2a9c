"""Log probabilities as the model gave them: before bias, penalties, temperature and cuts (vLLM's default)."""

from __future__ import annotations

import torch

from common.protocol import Logprob
from common.sampling.draw import likeliest

ROWS_AT_ONCE = 64  # bounds the float32 copies while a long prompt is scored: 64 x 49152 x 4 bytes = 12.6 MB


def gather_logprobs(logits: torch.Tensor, token_ids: list[int], count: int) -> list[dict[int, Logprob]]:
    """Score one known token per row, and report the likeliest ones beside it.

    Args:
        logits: `[n, V]`, raw, any float type.
        token_ids: `[n]`, the tokens that came.
        count: how many of the likeliest to add; -1 (or more than V) adds the whole vocabulary.

    Returns:
        For each row the known token first, then the likeliest in falling order (the known one may be among
        them).  Rank is 1 + the number of strictly larger logits, so equals share a rank.
    """
    width = logits.shape[-1]
    count = width if count < 0 else min(count, width)
    found: list[dict[int, Logprob]] = []
    for start in range(0, logits.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        found += _gather(logits[rows], token_ids[rows], count)
    return found


def _gather(logits: torch.Tensor, token_ids: list[int], count: int) -> list[dict[int, Logprob]]:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [n, V]
    known = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)  # [n, 1]
    known_rank = (scores > scores.gather(-1, known)).sum(dim=-1, keepdim=True)  # [n, 1], from 0
    values, top = likeliest(scores, count)  # [n, count] each
    top_rank = torch.searchsorted(-values, -values)  # [n, count], from 0: the first place of an equal
    ids = torch.cat([known, top], dim=-1)  # [n, 1 + count]
    ranks = torch.cat([known_rank, top_rank], dim=-1) + 1  # [n, 1 + count]
    logprobs = scores.log_softmax(dim=-1).gather(-1, ids)  # [n, 1 + count]
    return [
        {token: Logprob(logprob, rank) for token, logprob, rank in zip(*row, strict=True)}
        for row in zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    ]
