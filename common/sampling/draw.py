"""Temperature, min-p, top-k, top-p, and the draw: one uniform number becomes one token.

Tokens are ordered by falling logit, equals by rising id.  In this order each of the three cuts keeps a
prefix: min-p down to a threshold, top-k the first k, top-p as many as reach its share of what the other two
left.  So all of them together are one number per row, and what is kept does not hang on how a sort treats
equals.

The draw inverts the cumulative distribution: laid end to end, the kept tokens' probabilities cover a line,
and the token under the point at `uniform` of its length is taken.  A row with top-k or top-p lays them
likeliest first, any other row by id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

from common.sampling_params import SamplingParams

NUCLEUS_GUESS = 512  # candidates that are looked at first for a top-p row; most need fewer
TIES = 32  # candidates beyond k, so that equals of the k-th token are seen too
BLOCK = 256  # tokens per block of the two-level draw


def draw(scores: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> torch.Tensor:
    """Draw one token per row.

    Args:
        scores: `[R, V]`, edited logits, float32 or float64; the largest of each row is finite.  Overwritten.
        params: of the rows, none greedy, `[R]`.
        uniforms: a number in [0, 1) for each row, `[R]`.

    Returns:
        `[R]` int64; each token has a probability above zero.
    """
    width = scores.shape[-1]
    temperature = _column([min(p.temperature, torch.finfo(scores.dtype).max) for p in params], scores)
    # The maximum goes first: a logit of 11 over a temperature of 1e-5 has 6 digits before the point, and
    # what tells two tokens apart would be rounded away.
    scaled = scores.sub_(scores.amax(dim=-1, keepdim=True)).div_(temperature)  # [R, V]
    probs = scaled.softmax(dim=-1)  # [R, V]
    points = torch.tensor(uniforms, dtype=torch.float64, device=scores.device).unsqueeze(-1)  # [R, 1]
    is_cut = [0 < p.top_k < width or p.top_p < 1.0 for p in params]
    cut = [row for row, yes in enumerate(is_cut) if yes]
    whole = [row for row, yes in enumerate(is_cut) if not yes]
    tokens = torch.empty(len(params), dtype=torch.int64, device=scores.device)  # [R]
    if whole:
        tokens[whole] = _draw_whole(take_rows(probs, whole), [params[row] for row in whole], points[whole])
    if cut:
        tokens[cut] = _draw_cut(
            take_rows(scaled, cut), take_rows(probs, cut), [params[row] for row in cut], points[cut]
        )
    return tokens


def take_rows(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows `[len(rows), ...]`, in rising order; without a copy if these are all of them."""
    return matrix if len(rows) == matrix.shape[0] else matrix[rows]


def likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, `[R, count]` each: falling, equals by rising id.

    If the last place is shared, which of its equals get in is left open (unless all tokens are asked for).
    """
    if count == scores.shape[-1]:
        values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values, ids
    ids = scores.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values  # [R, count]
    values, order = torch.sort(scores.gather(-1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _draw_whole(probs: torch.Tensor, params: Seq[SamplingParams], points: torch.Tensor) -> torch.Tensor:
    """Draw among all tokens that min-p leaves, by id: first a block of 256 tokens, then one within it.

    One float64 sum over the whole vocabulary would take 20 times as long as the two short ones (on CPU).
    """
    if any(p.min_p for p in params):
        least = _column([p.min_p for p in params], probs) * probs.amax(dim=-1, keepdim=True)  # [R, 1]
        probs = probs.masked_fill(probs < least, 0.0)
    if probs.shape[-1] % BLOCK:
        probs = F.pad(probs, (0, -probs.shape[-1] % BLOCK))  # [R, V rounded up]
    blocks = probs.unflatten(-1, (-1, BLOCK))  # [R, V / 256, 256]
    ends = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # [R, V / 256]
    target = points * ends[:, -1:]  # [R, 1]
    block = _find(ends, target, ends[:, -1:])  # [R, 1]
    start = F.pad(ends, (1, 0)).gather(-1, block)  # [R, 1], where the block begins
    rows = torch.arange(len(params), device=probs.device)
    inside = blocks[rows, block.squeeze(-1)].cumsum(dim=-1, dtype=torch.float64)  # [R, 256]
    return (block * BLOCK + _find(inside, target - start, inside[:, -1:])).squeeze(-1)  # [R]


def _draw_cut(
    scaled: torch.Tensor, probs: torch.Tensor, params: Seq[SamplingParams], points: torch.Tensor
) -> torch.Tensor:
    """Draw among the tokens that top-k, top-p and min-p leave, likeliest first.

    Sorting a whole vocabulary takes some 2 ms per row on CPU, so only some candidates are sorted at first.
    Rows whose cut does not lie safely within them are sorted in full; both ways give the same token.
    """
    width = scaled.shape[-1]
    guess = max(p.top_k + TIES if 0 < p.top_k < width else NUCLEUS_GUESS for p in params)
    if scaled.is_cuda or guess >= width:  # on a GPU a sort is cheap, and asking which rows to redo is not
        return _draw_sorted(scaled, probs, params, points, width)[0]
    tokens, sure = _draw_sorted(scaled, probs, params, points, guess)
    redo = [row for row, ok in enumerate(sure.tolist()) if not ok]
    if redo:
        some = [params[row] for row in redo]
        tokens[redo] = _draw_sorted(scaled[redo], probs[redo], some, points[redo], width)[0]
    return tokens


def _draw_sorted(
    scaled: torch.Tensor, probs: torch.Tensor, params: Seq[SamplingParams], points: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the first `count` tokens of the order; also tell which rows needed no more than these.

    Returns:
        tokens `[R]`, and whether each is certain `[R]`; of no meaning if `count` is the whole vocabulary.
    """
    width = scaled.shape[-1]
    values, ids = likeliest(scaled, count)  # [R, count] each
    sorted_probs = probs.gather(-1, ids)  # [R, count]
    ends = sorted_probs.cumsum(dim=-1, dtype=torch.float64)  # [R, count]

    min_p = _column([p.min_p for p in params], probs)  # [R, 1]
    top_k = _column([p.top_k if 0 < p.top_k < width else width for p in params], ids)  # [R, 1]
    top_p = _column([p.top_p for p in params], ends)  # [R, 1]
    is_kept = (sorted_probs > 0) & (sorted_probs >= min_p * sorted_probs[:, :1])  # [R, count]
    kept = torch.minimum(is_kept.sum(dim=-1, keepdim=True), top_k).clamp(min=1)  # [R, 1]; 0 only beside NaN
    endless = (kept == count) & (min_p > 0)  # [R, 1], what min-p leaves may go on beyond the candidates
    uncut = (top_k == width) & (min_p == 0)  # [R, 1], top-p looks at the whole row, which adds up to 1
    total = torch.where(uncut, 1.0, ends.gather(-1, kept - 1))  # [R, 1]
    nucleus = torch.searchsorted(ends, top_p * total) + 1  # [R, 1], the shortest prefix that reaches top_p
    kept = torch.minimum(kept, nucleus)  # [R, 1]

    last = ends.gather(-1, kept - 1)  # [R, 1]
    place = _find(ends, points * last, last)  # [R, 1], below `kept`
    tokens = ids.gather(-1, place).squeeze(-1)  # [R]
    # Beyond the candidates lie smaller values, and perhaps equals of the last one.
    sure = (values.gather(-1, kept - 1) > values[:, -1:]) & ~endless  # [R, 1]
    return tokens, sure.squeeze(-1)  # [R] each


def _find(ends: torch.Tensor, target: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The stretch of a line that a point falls into.

    The first end beyond the point belongs to a stretch that has a length.  Rounding may put the point on or
    past the line's own end; held just below it, it finds a place in range.

    Args:
        ends: `[R, n]`, where each stretch ends, rising.
        target: `[R, 1]`, the points.
        last: `[R, 1]`, the end of the line: one of `ends`.

    Returns:
        `[R, 1]` int64.
    """
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    place = torch.searchsorted(ends, target, right=True)  # [R, 1]
    return place.clamp(max=ends.shape[-1] - 1)  # out of range only in a row with NaN


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    """One number per row, shaped `[R, 1]`, of the type and device of another tensor."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
