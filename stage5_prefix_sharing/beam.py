"""Beam search without an engine: from the live beams' likeliest next tokens to the next live beams.

    width 2, ends {.}          the 2 x 2 likeliest of all beams' continuations, best first

    live  "a"  -1.0    ->      a.  -1.3    among the first 2: a finished answer, to the pool
          "b"  -1.2            bc  -1.5    goes on
                               ad  -1.6    goes on: the live beams are 2 again
                               b.  -1.9    an end, and not among the first 2: dropped

Each of `width` beams has at most one end per ending id, so (1 + ending ids) x width candidates always hold
`width` beams that can go on.  The rules are those of transformers' `generate(num_beams=...)` (5.24,
`generation/utils.py`): which candidates count, when a search is over, what a score is.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import nsmallest

from common.beam_params import BeamSearchParams
from common.errors import InvalidValue
from common.lifecycle import check_request, max_len
from common.protocol import Counters, Engine, FinishReason, Request, StepOutput, TokenLogprobs


@dataclass(frozen=True)
class Beam:
    """An answer, finished or not: its tokens, and what the model said of each."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one mapping with one entry for each token
    logprob: float = 0.0  # their sum


def begin_search(engine: Engine, request: Request) -> BeamSearch:
    """The search of a request that has `beam`, with the engine's limits.

    Raises:
        InvalidValue: the request can never be served; see `Engine.add_request`.
    """
    assert request.beam is not None
    if request.params != request.beam.sampling_params():
        raise InvalidValue("params", request.params, "those that beam.sampling_params() gives")
    check_request(request, engine.model.config, engine.config)
    engine.kv.check_fits(request)
    room = max_len(engine) - len(request.prompt_token_ids)
    asked = request.beam.max_tokens
    return BeamSearch(
        request.beam, engine.model.config.eos_token_ids, room if asked is None else min(asked, room)
    )


class BeamSearch:
    """The live beams and the finished answers of one prompt.

    Args:
        params: how to search.
        eos_token_ids: the model's own end-of-sequence ids.
        max_tokens: most tokens of an answer, as far as the context reaches.

    Attributes:
        live: the beams that go on, best first.
        pool: finished answers, best first, at most `beam_width`.
        num_candidates: how many of each live beam's likeliest tokens `step` needs to be given.
        done: whether the search is over.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int], max_tokens: int) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.ends = params.ends(eos_token_ids)
        self.num_candidates = max(2, 1 + len(self.ends)) * params.beam_width
        self.live = [Beam()]
        self.pool: list[Beam] = []
        self.done = False

    def step(self, candidates: Seq[TokenLogprobs]) -> list[tuple[int, int]]:
        """Choose the next live beams.

        Args:
            candidates: for each live beam its `num_candidates` likeliest tokens (more do no harm).

        Returns:
            (place of the parent among the live beams so far, token) of each next one, best first.
        """
        width, length = self.params.beam_width, len(self.live[0].token_ids) + 1
        ranked = self._rank(candidates)
        ends = [token in self.ends or length == self.max_tokens for _, token in ranked]
        finished = [choice for choice, end in zip(ranked[:width], ends, strict=False) if end]
        chosen = [choice for choice, end in zip(ranked, ends, strict=True) if not end][:width]

        def grown(parent: int, token: int) -> Beam:
            beam, entry = self.live[parent], candidates[parent][token]
            return Beam(
                (*beam.token_ids, token), (*beam.logprobs, {token: entry}), beam.logprob + entry.logprob
            )

        self.pool += [grown(*choice) for choice in finished]
        self.pool = sorted(self.pool, key=self.score, reverse=True)[:width]  # stable: of equals the older one
        self.live = [grown(*choice) for choice in chosen]
        self.done = not self.live or (len(self.pool) == width and self._is_settled())
        return chosen

    def score(self, beam: Beam) -> float:
        """By what finished answers are compared."""
        return self.params.score(beam.logprob, len(beam.token_ids))

    def answers(self, request: Request, counters: Counters) -> list[StepOutput]:
        """The best `n` finished answers as an engine reports them, best first, each with all of its tokens.

        Args:
            request: whose they are.
            counters: what the search has cost; told with the best answer, so that a sum counts it once.
        """
        outputs = []
        for index, beam in enumerate(self.pool[: self.params.n]):
            own = counters if index == 0 else Counters(prompt_tokens=counters.prompt_tokens)
            own.output_tokens = len(beam.token_ids)
            last = beam.token_ids[-1]
            stopped = last in self.ends
            outputs.append(
                StepOutput(
                    request_id=request.request_id,
                    index=index,
                    new_token_ids=beam.token_ids,
                    finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
                    stop_reason=last if last in self.params.stop_token_ids else None,
                    logprobs=beam.logprobs,
                    counters=own,
                )
            )
        return outputs

    def _rank(self, candidates: Seq[TokenLogprobs]) -> list[tuple[int, int]]:
        """The likeliest (parent, token) of all beams together, equals by parent and then by token id."""
        keys = (
            (-(beam.logprob + entry.logprob), parent, token)
            for parent, (beam, tokens) in enumerate(zip(self.live, candidates, strict=True))
            for token, entry in tokens.items()
        )
        return [(parent, token) for _, parent, token in nsmallest(self.num_candidates, keys)]

    def _is_settled(self) -> bool:
        """Whether the full pool will do: the search need not, or cannot, make it better."""
        if self.params.early_stopping is True:
            return True
        best, length = self.live[0], len(self.live[0].token_ids)
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_tokens
        return self.params.score(best.logprob, length) <= self.score(self.pool[-1])
