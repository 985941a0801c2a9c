"""Grammars on a batch: one bit per token says what may come next, and all rows are masked at once."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch

from common.sequence import Sequence
from common.structured import Matcher


def mask_logits(scores: torch.Tensor, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Leave to each sequence that has a grammar only the tokens that continue it, in place.

    A grammar is stronger than every other rule.  Where `allowed_token_ids`, `bad_words` and `min_tokens` have
    banned all that it allows, they give way in that step (and so do bias and penalties): the likeliest of what
    the grammar allows is then judged by the raw logits.

    Args:
        scores: `[R, V]`, edited logits, float32 or float64.
        logits: `[R, V]`, the same as the model gave them.
        sequences: whose rows these are, `[R]`.
    """
    matchers = {row: seq.matcher for row, seq in enumerate(sequences) if seq.matcher is not None}
    if not matchers:
        return
    forbidden = _forbidden(matchers, *scores.shape).to(scores.device)  # [R, V]
    scores.masked_fill_(forbidden, -torch.inf)
    banned = [row for row in matchers if _has_bans(sequences[row])]
    if banned:
        empty = (scores[banned].amax(dim=-1) == -torch.inf).tolist()  # [rows with bans]
        for row in (row for row, nothing_left in zip(banned, empty, strict=True) if nothing_left):
            scores[row] = logits[row].masked_fill(forbidden[row], -torch.inf)  # [V]


def _forbidden(matchers: Mapping[int, Matcher], num_rows: int, width: int) -> torch.Tensor:
    """Which tokens each row must not take: `[R, V]` bool, on the host; rows without a matcher take any."""
    words = max(matcher.mask_words for matcher in matchers.values())
    bits = np.full((num_rows, words), -1, dtype=np.int32)  # [R, V / 32], all allowed
    for row, matcher in matchers.items():
        matcher.fill(bits[row])
    np.invert(bits, out=bits)
    flags = np.unpackbits(bits.view(np.uint8), axis=-1, count=width, bitorder="little")  # [R, V]
    return torch.from_numpy(flags).view(torch.bool)  # [R, V]


def _has_bans(seq: Sequence) -> bool:
    return bool(
        seq.params.allowed_token_ids is not None
        or seq.request.bad_words_token_ids
        or seq.num_output_tokens < seq.params.min_tokens
    )
