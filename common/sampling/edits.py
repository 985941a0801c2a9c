"""What a request forbids, favours and penalises, written into its row of logits before anything is chosen.

Each edit gathers the (row, token) pairs of the rows that ask for it, and touches these cells only.  No row is
padded, so no padding id can be taken for text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch

from common.sequence import Sequence

Cells = tuple[torch.Tensor, torch.Tensor]
"""Rows and token ids of the same length: `scores[cells]` reads one number for each pair."""


def needs_edits(seq: Sequence) -> bool:
    """Whether `edit_logits` or a grammar would do anything to this sequence's row in this step."""
    params = seq.params
    return bool(
        seq.matcher is not None
        or params.allowed_token_ids is not None
        or seq.request.bad_words_token_ids
        or seq.num_output_tokens < params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
    )


def edit_logits(scores: torch.Tensor, sequences: Seq[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Apply allowed tokens, bans, bias and penalties in place, in vLLM's order.

    Bad words and `min_tokens` are bans.  If they would leave a row without a single token, they are lifted in
    that step: the answer then breaks one of its own rules rather than failing or leaving `allowed_token_ids`.

    Args:
        scores: `[R, V]`, float32 or float64.
        sequences: whose rows these are, `[R]`.
        eos_token_ids: banned until `min_tokens` are there, also under `ignore_eos` (as in vLLM).
    """
    _allow(scores, sequences)
    _ban(scores, sequences, eos_token_ids)
    _bias(scores, sequences)
    _penalise_repeats(scores, sequences)
    _penalise_counts(scores, sequences)


def _allow(scores: torch.Tensor, sequences: Seq[Sequence]) -> None:
    asked = {
        row: seq.params.allowed_token_ids
        for row, seq in enumerate(sequences)
        if seq.params.allowed_token_ids is not None
    }
    if asked:
        cells = _cells(asked, scores.device)
        allowed = scores[cells]  # [cells]
        scores[list(asked)] = -torch.inf
        scores[cells] = allowed


def _ban(scores: torch.Tensor, sequences: Seq[Sequence], eos_token_ids: frozenset[int]) -> None:
    asked = {row: _banned(seq, eos_token_ids, scores.shape[-1]) for row, seq in enumerate(sequences)}
    if any(asked.values()):
        scores[_cells(asked, scores.device)] = -torch.inf


def _banned(seq: Sequence, eos_token_ids: frozenset[int], width: int) -> set[int]:
    """Ids that must not come next; ids beyond the logits (V = `width`) cannot come anyway."""
    params, banned = seq.params, set()
    for *prefix, last in seq.request.bad_words_token_ids:
        length = len(prefix)
        if length <= seq.num_output_tokens and seq.token_ids[len(seq.token_ids) - length :] == prefix:
            banned.add(last)
    if seq.num_output_tokens < params.min_tokens:
        banned.update(eos_token_ids, params.stop_token_ids or ())
    banned = {token for token in banned if token < width}
    allowed = params.allowed_token_ids
    nothing_left = len(banned) == width if allowed is None else all(token in banned for token in allowed)
    return set() if nothing_left else banned


def _bias(scores: torch.Tensor, sequences: Seq[Sequence]) -> None:
    asked = {row: seq.params.logit_bias for row, seq in enumerate(sequences) if seq.params.logit_bias}
    if asked:
        bias = list(chain.from_iterable(biases.values() for biases in asked.values()))
        scores[_cells(asked, scores.device)] += torch.tensor(bias, dtype=scores.dtype, device=scores.device)


def _penalise_repeats(scores: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Push down the tokens of prompt and answer, each once however often it stands there.

    A token that occurs twice is read twice and written twice with the same number, hence penalised once.
    """
    asked = {row: seq.token_ids for row, seq in enumerate(sequences) if seq.params.repetition_penalty != 1.0}
    if not asked:
        return
    cells = _cells(asked, scores.device)
    limits = torch.finfo(scores.dtype)
    # Held within what the type can express: a penalty of 1e300 must give huge numbers, never 0 x inf = NaN.
    penalties = [min(max(seq.params.repetition_penalty, limits.tiny), limits.max) for seq in sequences]  # [R]
    penalty = torch.tensor(penalties, dtype=scores.dtype, device=scores.device)[cells[0]]  # [cells]
    old = scores[cells]  # [cells]
    new = torch.where(old > 0, old / penalty, old * penalty).clamp(limits.min, limits.max)
    scores[cells] = torch.where(old == -torch.inf, old, new)


def _penalise_counts(scores: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Push down the tokens of the answer: by `frequency_penalty` per occurrence, `presence_penalty` once."""
    asked = {
        row: seq.output_token_ids
        for row, seq in enumerate(sequences)
        if seq.params.frequency_penalty or seq.params.presence_penalty
    }
    if not any(asked.values()):
        return
    rows, ids = _pairs(asked)
    width = scores.shape[-1]
    cells, counts = np.unique(rows * width + ids, return_counts=True)
    rows, ids = np.divmod(cells, width)
    frequency = np.array([seq.params.frequency_penalty for seq in sequences])[rows]
    presence = np.array([seq.params.presence_penalty for seq in sequences])[rows]
    penalty = torch.from_numpy(frequency * counts + presence).to(scores.device, scores.dtype)  # [cells]
    scores[_to_device(rows, ids, scores.device)] -= penalty


def _pairs(tokens_by_row: Mapping[int, Collection[int]]) -> tuple[np.ndarray, np.ndarray]:
    """One (row, token) pair for each token, rows in order."""
    lengths = [len(tokens) for tokens in tokens_by_row.values()]
    rows = np.repeat(np.fromiter(tokens_by_row, dtype=np.int64), lengths)
    ids = np.fromiter(chain.from_iterable(tokens_by_row.values()), dtype=np.int64, count=sum(lengths))
    return rows, ids


def _cells(tokens_by_row: Mapping[int, Collection[int]], device: torch.device) -> Cells:
    rows, ids = _pairs(tokens_by_row)
    return _to_device(rows, ids, device)


def _to_device(rows: np.ndarray, ids: np.ndarray, device: torch.device) -> Cells:
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)
