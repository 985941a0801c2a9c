"""The executor alone: which rows of a mixed forward are sampled, which score a prompt, which are nobody's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import softmax

from common.batch import ForwardBatch
from common.model.config import ModelConfig
from common.protocol import Request
from common.runner import ModelExecutor
from common.sampling_params import SamplingParams
from common.sequence import Sequence

WIDTH = 12


class RowByToken:
    """The logits of a row depend on its token and position, so that no two rows of a test are alike."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self) -> None:
        self.config = ModelConfig("Scripted", WIDTH, 8, 8, 1, 1, 1, 8, 64, 1e-6, (1.0,))
        self.rows: list[int] = []  # logits rows of each forward

    @staticmethod
    def row(token: int, position: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(1000 * token + position)).double()

    def forward(self, batch: ForwardBatch, kv: object) -> torch.Tensor:
        wanted = batch.logits_rows.tolist()
        self.rows.append(len(wanted))
        return torch.stack([self.row(int(batch.input_ids[t]), int(batch.positions[t])) for t in wanted])


class NothingKept:
    """A KV backend with nothing to prepare."""

    def prepare(self, batch: ForwardBatch, scheduled: object) -> None:
        pass


def sequence(name: str, prompt: range, computed: int = 0, **params: object) -> Sequence:
    """A greedy sequence of which so many tokens are computed."""
    seq = Sequence(Request(name, tuple(prompt), SamplingParams(temperature=0, **params)))
    seq.num_computed_tokens = computed
    return seq


def test_a_mixed_forward() -> None:
    """An unfinished chunk, a scored prompt, a scored chunk, a decode, a prompt: everyone gets their own rows."""
    scheduled = [
        (sequence("chunk", range(9)), 4),
        (sequence("scored", range(5, 9), prompt_logprobs=1), 4),
        (sequence("scored chunk", range(3, 11), prompt_logprobs=0), 5),
        (sequence("decode", range(2, 8), computed=5), 1),
        (sequence("prompt", range(1, 4)), 3),
    ]
    model = RowByToken()
    got = ModelExecutor(model, NothingKept()).execute(scheduled)
    assert model.rows == [4 + 5 + 1 + 1]
    last = {1: (8, 3), 3: (7, 5), 4: (3, 2)}  # (token, position) of the rows that are sampled
    want = [int(model.row(*last[i]).argmax()) if i in last else None for i in range(5)]
    assert [token and token.token_id for token in got] == want
    for seq, num_new in scheduled[1:3]:
        assert len(seq.prompt_logprobs) == min(num_new, len(seq.token_ids) - 1) + 1
        for position, entry in enumerate(seq.prompt_logprobs[1:]):
            target = seq.token_ids[position + 1]
            row = softmax(model.row(seq.token_ids[position], position).numpy())
            assert entry[target].logprob == pytest.approx(np.log(row[target]))
    assert all(not scheduled[i][0].prompt_logprobs for i in (0, 3, 4))


def test_a_prompt_is_scored_once() -> None:
    """A row of logits costs a product with the whole vocabulary: recomputed prompts ask for the last one only."""
    seq, model = sequence("a", range(6), prompt_logprobs=0), RowByToken()
    executor = ModelExecutor(model, NothingKept())
    for _ in range(3):  # as stage 1 does, or a preempted sequence
        [token] = executor.execute([(seq, len(seq.token_ids))])
        seq.token_ids.append(token.token_id)
    assert model.rows == [6, 1, 1]
    assert len(seq.prompt_logprobs) == 6
