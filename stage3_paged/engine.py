"""Stage 3: keep K/V in fixed-size blocks, taken one at a time when a token needs it; batches stay static."""

from __future__ import annotations

from collections import deque

from common.batch import Scheduled
from common.config import EngineConfig
from common.lifecycle import abort_matching, advance, check_in, check_unchunked
from common.protocol import Capabilities, EngineStats, Executor, Model, Request, StepOutput
from common.runner import ModelExecutor
from common.sequence import Sequence
from stage3_paged.kv_cache import PagedCache


def make_engine(model: Model, config: EngineConfig) -> PagedEngine:
    """Build the engine over a model."""
    kv = PagedCache(model, config)
    return PagedEngine(model, config, kv, ModelExecutor(model, kv, config))


class PagedEngine:
    """First come, first served, in batches whose members enter together and leave together.

    A sequence holds the blocks that its tokens fill, and gives them back the moment it ends.  So many more
    fit, and a pool may run dry in the middle: then the youngest member goes back to the queue and will be
    computed again.  A member that ends early still leaves its place idle until the slowest is done.
    """

    capabilities = Capabilities(remembers_kv=True, batches=True, paged=True, preempts=True)

    def __init__(self, model: Model, config: EngineConfig, kv: PagedCache, executor: Executor) -> None:
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
        """Compute the next token of each unfinished member of the batch."""
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
        """The batch's unfinished members with what they have not computed; a new batch when it is over."""
        if not self.running:
            self._form_batch()
        served = 0
        while served < len(self.running):  # oldest first, so whoever has room keeps it
            seq = self.running[served]
            if self.kv.blocks.allocate(seq, len(seq.token_ids)) is None:
                self._preempt_youngest()
            else:
                served += 1
        return [(seq, len(seq.token_ids) - seq.num_computed_tokens) for seq in self.running]

    def _form_batch(self) -> None:
        """Let requests in, in order, as long as there are places, blocks, and room in one forward."""
        budget = self.config.max_num_batched_tokens
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            budget -= len(seq.token_ids)
            if budget < 0 or not self.kv.blocks.can_admit(seq):
                break
            self.kv.blocks.allocate(seq, len(seq.token_ids))
            self.running.append(self.waiting.popleft())

    def _preempt_youngest(self) -> None:
        """Take a sequence's blocks and put it at the head of the queue; it keeps its tokens and generator."""
        seq = self.running.pop()
        self.kv.blocks.free(seq)
        seq.num_computed_tokens = 0
        seq.counters.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(seq)

    def _release_finished(self) -> None:
        """Give a sequence's blocks back the moment it ends; its place in the batch stays empty."""
        for seq in self.running:
            if seq.finished:
                self.kv.blocks.free(seq)
        self.running = [seq for seq in self.running if not seq.finished]
