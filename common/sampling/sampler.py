"""One token per row of logits: edit, choose or draw, report (the order of vLLM's v1/sample/sampler.py)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq

import torch

from common.errors import BadLogits
from common.protocol import SampledToken, TokenLogprobs
from common.sampling.draw import draw, take_rows
from common.sampling.edits import edit_logits, needs_edits
from common.sampling.logprobs import gather_logprobs
from common.sampling.masks import mask_logits
from common.sequence import Sequence

BLOCK = 512  # numbers of a row that are looked through at once, if that divides the row; else a smaller power of two
LEAST_BLOCK, LEAST_ROWS = 64, 12  # below either it would take longer than looking through each row once


def sample(
    logits: torch.Tensor, sequences: Seq[Sequence], eos_token_ids: frozenset[int]
) -> list[SampledToken]:
    """Choose the next token of each sequence.

    A row's token depends on that row's logits, its sequence and its sequence's generator, and on nothing
    else in the batch.  A greedy row takes its likeliest token (the lowest id of equals) and leaves the
    generator alone; any other row draws exactly one number from it, even if only one token is left.  So
    the generator's state tells how many tokens were drawn, whatever happened in between.

    Args:
        logits: `[R, V]`, any float type.  Not changed.  Work is done in float32, and in float64 if that is
            what came.
        sequences: whose rows these are, `[R]`.
        eos_token_ids: the model's own end-of-sequence ids, for `min_tokens`.

    Raises:
        BadLogits: a row holds NaN or +inf, or nothing but -inf.  The numbers that were drawn are kept for
            the next call.
    """
    drawn = [row for row, seq in enumerate(sequences) if not seq.params.greedy]
    uniforms = [sequences[row].uniform() for row in drawn]
    scores = logits
    if drawn or any(needs_edits(seq) for seq in sequences):
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        edit_logits(scores, sequences, eos_token_ids)
        mask_logits(scores, logits, sequences)
    if len(drawn) < len(sequences):
        peaks, tokens = first_largest(scores)  # [R] each
    else:
        peaks = scores.amax(dim=-1)  # [R]
        tokens = torch.empty_like(peaks, dtype=torch.int64)  # [R]
    if drawn:
        params = [sequences[row].params for row in drawn]
        tokens[drawn] = draw(take_rows(scores, drawn), params, uniforms)
    token_ids: list[int] = tokens.tolist()  # the only wait for the device, unless logprobs are wanted
    for seq, peak in zip(sequences, peaks.tolist(), strict=True):
        if not math.isfinite(peak):
            for row, uniform in zip(drawn, uniforms, strict=True):
                sequences[row].unused_uniform = uniform
            raise BadLogits(seq.request_id, peak)
    logprobs = _logprobs(logits, sequences, token_ids)
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(token_ids)]


def first_largest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scores.max(dim=-1)`: the largest number of each row `[R]` and the lowest id that has it `[R]`.

    On a CPU, `amax` is vectorised and `max`, which also says where, is not.  So the largest of each block is found
    first, and only in the first block that has the row's largest is it asked where.  Not `argmax`: it takes longest.

    Args:
        scores: `[R, V]`.  In a row with NaN the largest is NaN.
    """
    block = math.gcd(scores.shape[-1], BLOCK)
    if scores.is_cuda or block < LEAST_BLOCK or len(scores) < LEAST_ROWS:
        return scores.max(dim=-1)
    blocks = scores.unflatten(-1, (-1, block))  # [R, V / block, block]
    peaks, first = blocks.amax(dim=-1).max(dim=-1)  # [R] each
    inside = blocks[torch.arange(len(first)), first].max(dim=-1).indices  # [R]
    return peaks, first * block + inside


def _logprobs(
    logits: torch.Tensor, sequences: Seq[Sequence], token_ids: list[int]
) -> dict[int, TokenLogprobs]:
    """Row -> its log probabilities, for the rows that ask; rows that ask for as many go together."""
    rows_by_count: dict[int, list[int]] = defaultdict(list)
    for row, seq in enumerate(sequences):
        if seq.params.logprobs is not None:
            rows_by_count[seq.params.logprobs].append(row)
    found: dict[int, TokenLogprobs] = {}
    for count, rows in rows_by_count.items():
        chosen = [token_ids[row] for row in rows]
        found.update(zip(rows, gather_logprobs(logits[rows], chosen, count), strict=True))
    return found
