"""Beam search above an engine, the way vLLM does it now: every step submits every live beam anew.

A beam is an ordinary request: the prompt and the beam's tokens, one token to come, and the log probabilities of
the likeliest ones.  The engine knows nothing of beams, so any stage's will do.  Without a prefix cache each
of these requests computes its whole text again; with one, all but the end of it is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from common.errors import InvalidValue
from common.protocol import Counters, Engine, Request, StepOutput, TokenLogprobs
from stage5_prefix_sharing.beam import BeamSearch, begin_search


class ResubmittedBeams:
    """All beam searches above one engine, beside its ordinary requests.

    It owns no loop.  Whoever drives the engine adds the requests that `start` and `take` hand out:

        for request in beams.start(beam_request):
            engine.add_request(request)
        for outputs in drive(engine, others):
            news, requests = beams.take(outputs)
            for request in requests:
                engine.add_request(request)
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.searches: dict[str, _Search] = {}  # by the beam request's id
        self.search_of: dict[str, _Search] = {}  # by the id of a request that is in the engine
        self.ids = count()

    def start(self, request: Request) -> list[Request]:
        """Begin the search of a request that has `beam`: what to add to the engine now.

        Raises:
            InvalidValue: it can never be served, or a search of the same id is going on.
        """
        if request.request_id in self.searches:
            raise InvalidValue("request_id", request.request_id, "an id that no search has")
        search = _Search(request, begin_search(self.engine, request))
        self.searches[request.request_id] = search
        return self._submit(search)

    def take(self, outputs: Iterable[StepOutput]) -> tuple[list[StepOutput], list[Request]]:
        """Take what a step brought.

        Returns:
            The step outputs of ordinary requests and of searches that are over, and what to add next.
        """
        passed: list[StepOutput] = []
        requests: list[Request] = []
        for out in outputs:
            search = self.search_of.pop(out.request_id, None)
            if search is None:
                passed.append(out)
            elif search.take(out):
                if search.beams.done:
                    del self.searches[search.request.request_id]
                    passed += search.beams.answers(search.request, search.counters)
                else:
                    requests += self._submit(search)
        return passed, requests

    def abort(self, request_id: str) -> list[str]:
        """Forget a search: the ids of its requests that are still in the engine, to be aborted there."""
        search = self.searches.pop(request_id, None)
        return [] if search is None else [name for name in search.places if self.search_of.pop(name, None)]

    def _submit(self, search: _Search) -> list[Request]:
        request = search.request
        params = replace(request.params, n=1, max_tokens=1, logprobs=search.beams.num_candidates)
        requests = [
            replace(
                request,
                request_id=f"{request.request_id}/beam-{next(self.ids)}",
                prompt_token_ids=request.prompt_token_ids + beam.token_ids,
                params=params,
                beam=None,
            )
            for beam in search.beams.live
        ]
        search.places = {request.request_id: place for place, request in enumerate(requests)}
        self.search_of.update(dict.fromkeys(search.places, search))
        return requests


class _Search:
    """One search, and what of its present step has come back."""

    def __init__(self, request: Request, beams: BeamSearch) -> None:
        self.request = request
        self.beams = beams
        self.counters = Counters(prompt_tokens=len(request.prompt_token_ids))
        self.places: dict[str, int] = {}  # submitted id -> place among the live beams
        self.found: dict[int, TokenLogprobs] = {}  # place -> its candidates

    def take(self, out: StepOutput) -> bool:
        """Take one beam's candidates; whether they were the last that lacked, so that a step was made."""
        assert out.logprobs is not None  # asked for in every request
        self.found[self.places[out.request_id]] = out.logprobs[0]
        self._count(out.counters)
        if len(self.found) < len(self.places):
            return False
        self.beams.step([self.found[place] for place in range(len(self.places))])
        self.found.clear()
        return True

    def _count(self, cost: Counters) -> None:
        if not self.beams.live[0].token_ids:  # what is found of the prompt counts once, as for any request
            self.counters.cached_tokens = cost.cached_tokens
        self.counters.forwards += cost.forwards
        self.counters.tokens_computed += cost.tokens_computed
        self.counters.preemptions += cost.preemptions
