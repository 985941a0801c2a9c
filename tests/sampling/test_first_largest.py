"""Finding the likeliest token block by block says the same as looking through the whole row at once."""

from __future__ import annotations

import pytest
import torch

from common.sampling.sampler import LEAST_ROWS, first_largest

WIDTHS = [1, 64, 192, 1000, 49_152, 151_936]  # 1 and 1,000 are not made of blocks; 151,936 is, of 128


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_as_torch_has_it(dtype: torch.dtype, width: int) -> None:
    """Values, and the first place of equals: few different numbers, so that most rows have many equals."""
    generator = torch.Generator().manual_seed(width)
    scores = torch.randint(-9, 3, (LEAST_ROWS, width), generator=generator).to(dtype)
    scores[3] = -torch.inf
    peaks, tokens = first_largest(scores)
    assert torch.equal(peaks, scores.max(dim=-1).values)
    assert tokens.tolist() == [row.tolist().index(max(row.tolist())) for row in scores]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_logit_shows_wherever_it_stands(width: int, bad: float) -> None:
    """NaN is the largest of its row and of no other; so is infinity."""
    for place in {0, width // 2, width - 1}:
        scores = torch.randn(LEAST_ROWS, width)
        scores[1, place] = bad
        peaks = first_largest(scores)[0]
        assert peaks.isfinite().tolist() == [True, False] + [True] * (LEAST_ROWS - 2)
