"""Stage 1: serve a model correctly, one request at a time, recomputing everything for every token."""

from __future__ import annotations

from collections import deque

from common.batch import Scheduled
from common.config import EngineConfig
from common.lifecycle import abort_matching, advance, check_in, check_unchunked
from common.protocol import Capabilities, EngineStats, Executor, Model, Request, StepOutput
from common.runner import ModelExecutor
from common.sequence import Sequence
from stage1_naive.no_cache import NoCache


def make_engine(model: Model, config: EngineConfig) -> NaiveEngine:
    """Build the engine over a model."""
    kv = NoCache(model.config)
    return NaiveEngine(model, config, kv, ModelExecutor(model, kv))


class NaiveEngine:
    """First come, first served, and nothing is remembered between two tokens.

    For the token at position S the model runs over all S tokens before it, though S - 1 of them went through
    it a moment ago: an answer of n tokens to a prompt of p costs n * p + n * (n - 1) / 2 token forwards.
    """

    capabilities = Capabilities()

    def __init__(self, model: Model, config: EngineConfig, kv: NoCache, executor: Executor) -> None:
        check_unchunked(config)
        self.model = model
        self.config = config
        self.kv = kv
        self.executor = executor
        self.stats = EngineStats()
        self.live: dict[str, list[Sequence]] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.last_batch: Scheduled = []

    def add_request(self, request: Request) -> None:
        """Queue a request; see `Engine.add_request`."""
        self.waiting.extend(check_in(self, request))

    def abort(self, request_id: str, index: int | None = None) -> list[StepOutput]:
        """Take a request, or one of its answers, back; see `Engine.abort`."""
        outputs = abort_matching(self, request_id, index)
        self.waiting = deque(seq for seq in self.waiting if not seq.finished)
        self._release_finished()
        return outputs

    def step(self) -> list[StepOutput]:
        """Compute the next token of the request whose turn it is."""
        scheduled = self._schedule()
        if not scheduled:
            return []
        sampled = self.executor.execute(scheduled)
        outputs = advance(self, scheduled, sampled)
        self._release_finished()
        return outputs

    def has_unfinished(self) -> bool:
        """Whether another step would do something."""
        return bool(self.running or self.waiting)

    def sequences(self) -> list[Sequence]:
        """The unfinished sequences, running first."""
        return [*self.running, *self.waiting]

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """The running request with its whole prefix; the next one in the queue when there is none."""
        if not self.running and self.waiting:
            self.running.append(self.waiting.popleft())
        for seq in self.running:
            seq.num_computed_tokens = 0  # nothing was kept
        return [(seq, len(seq.token_ids)) for seq in self.running]

    def _release_finished(self) -> None:
        """Make room for the next request once the running one is done."""
        self.running = [seq for seq in self.running if not seq.finished]
