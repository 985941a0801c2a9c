"""Beam search inside the engine, as in the paper (4.4): a beam goes on in its parent's blocks.

Each live beam is a sequence.  When all of a search have their candidates, the next beams are forked from their
parents and the parents end: a parent's blocks pass to its children, and are copied only where two children
write different tokens (copy-on-write).

    step      beam 0   [3, 7, 1]                 -> parent of the new beams 0 and 1
              beam 1   [3, 7, 5]                 -> no child: block 5 is free again
    next      beam 0   [3, 7, 1] + one token     block 1: owners 2
              beam 1   [3, 7, 1] + one token     whoever writes first gets a copy of block 1
"""

from __future__ import annotations

from dataclasses import replace

from common.batch import Scheduled
from common.lifecycle import check_in
from common.protocol import Counters, Engine, FinishReason, Request, SampledToken, StepOutput, TokenLogprobs
from common.sequence import Sequence
from stage5_prefix_sharing.beam import BeamSearch, begin_search
from stage5_prefix_sharing.scheduler import Scheduler


class BeamGroups:
    """The beam searches that go on in an engine."""

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.groups: dict[str, _Group] = {}  # by request id

    def __contains__(self, request_id: str) -> bool:
        """Whether this is the id of a search that goes on."""
        return request_id in self.groups

    def add(self, request: Request) -> None:
        """Begin a search with one beam, the prompt.

        To the sampler a beam is a greedy request that reports its likeliest tokens.
        """
        search = begin_search(self.engine, request)
        params = replace(request.params, n=1, logprobs=search.num_candidates)
        [root] = check_in(self.engine, replace(request, params=params))
        self.groups[request.request_id] = _Group(request, search, root)
        self.scheduler.add(root)

    def collect(self, scheduled: Scheduled, sampled: list[SampledToken | None]) -> list[SampledToken | None]:
        """Keep the candidates of beams that have caught up, and let these wait for the rest of their search.

        Returns:
            `sampled` with None for every beam: no token of its own is appended to it.
        """
        others = sampled.copy()
        for row, ((seq, _), token) in enumerate(zip(scheduled, sampled, strict=True)):
            group = self.groups.get(seq.request_id)
            if group is not None and token is not None:
                assert token.logprobs is not None  # asked for in `add`
                group.candidates[seq.index] = token.logprobs
                self.scheduler.park(seq)
                others[row] = None
        return others

    def select(self) -> list[StepOutput]:
        """One step of every search whose beams all have their candidates: the answers of those that are over."""
        outputs: list[StepOutput] = []
        for group in list(self.groups.values()):
            if len(group.candidates) == len(group.beams):
                chosen = group.search.step([group.candidates[i] for i in range(len(group.beams))])
                if group.search.done:
                    outputs += self._answer(group)
                else:
                    self._grow(group, chosen)
        return outputs

    def abort(self, request_id: str, index: int | None) -> list[StepOutput]:
        """Take a search back; or one of its answers, which is then not told, until none is left."""
        group = self.groups[request_id]
        hit = [i for i in group.wanted if index in (None, i)]
        group.wanted = [i for i in group.wanted if i not in hit]
        if not group.wanted:
            self._end(group)
        self.engine.stats.sequences_aborted += len(hit)
        return [StepOutput(request_id, i, (), FinishReason.ABORT, counters=group.counters(i)) for i in hit]

    def _grow(self, group: _Group, chosen: list[tuple[int, int]]) -> None:
        """The chosen (parent, token) are the next beams, each forked from its parent."""
        parents, group.beams = group.beams, []
        for place, (parent, token) in enumerate(chosen):
            beam = Sequence(parents[parent].request, place)
            beam.counters = group.cost
            beam.token_ids = [*parents[parent].token_ids, token]
            self.scheduler.fork(parents[parent], beam)
            group.beams.append(beam)
        for seq in parents:
            seq.finish_reason = FinishReason.ABORT  # its blocks go with the next release
        group.candidates.clear()
        self.engine.live[group.request.request_id] = group.beams.copy()

    def _answer(self, group: _Group) -> list[StepOutput]:
        answers = group.search.answers(group.request, group.cost)
        outputs = [out for out in answers if out.index in group.wanted]
        self.engine.stats.sequences_finished += len(outputs)
        self.engine.stats.tokens_emitted += sum(len(out.new_token_ids) for out in outputs)
        self._end(group)
        return outputs

    def _end(self, group: _Group) -> None:
        for seq in group.beams:
            seq.finish_reason = FinishReason.ABORT
        del self.groups[group.request.request_id]
        del self.engine.live[group.request.request_id]


class _Group:
    """One search, the sequences that are its live beams, and what of the present step has come."""

    def __init__(self, request: Request, search: BeamSearch, root: Sequence) -> None:
        self.request = request
        self.search = search
        self.beams = [root]  # by place, which is the sequence's index
        self.candidates: dict[int, TokenLogprobs] = {}  # place -> its likeliest next tokens
        self.wanted = list(range(search.params.n))  # answers that nobody has taken back
        self.cost = root.counters  # of all its beams: they share it

    def counters(self, index: int) -> Counters:
        """Of one answer: the first one tells what the search has cost, so that a sum counts it once."""
        return self.cost if index == 0 else Counters(prompt_tokens=self.cost.prompt_tokens)
