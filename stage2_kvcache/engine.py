"""Stage 2: remember K/V in one contiguous reservation per request, and compute requests in static batches."""

from __future__ import annotations

from collections import deque

from common.batch import Scheduled
from common.config import EngineConfig
from common.lifecycle import abort_matching, advance, check_in, check_unchunked
from common.protocol import Capabilities, EngineStats, Executor, Model, Request, StepOutput
from common.runner import ModelExecutor
from common.sequence import Sequence
from stage2_kvcache.kv_cache import ContiguousCache


def make_engine(model: Model, config: EngineConfig) -> KVCacheEngine:
    """Build the engine over a model."""
    kv = ContiguousCache(model, config)
    return KVCacheEngine(model, config, kv, ModelExecutor(model, kv))


class KVCacheEngine:
    """First come, first served, in batches whose members enter together and leave together.

    Each token goes through the model once; its K/V stays in the sequence's reservation.  A member that ends
    early leaves its place idle, and its reservation taken, until the slowest of the batch is done.
    """

    capabilities = Capabilities(remembers_kv=True, batches=True)

    def __init__(self, model: Model, config: EngineConfig, kv: ContiguousCache, executor: Executor) -> None:
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
        return [*(seq for seq in self.running if not seq.finished), *self.waiting]

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """The batch's unfinished members with what they have not computed; a new batch when it is over."""
        if not self.running:
            self._form_batch()
        members = [seq for seq in self.running if not seq.finished]
        return [(seq, len(seq.token_ids) - seq.num_computed_tokens) for seq in members]

    def _form_batch(self) -> None:
        """Let requests in, in order, as long as there are places, slots, and room in one forward."""
        budget = self.config.max_num_batched_tokens
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            budget -= len(seq.token_ids)
            if budget < 0 or self.kv.allocate(seq) is None:
                break
            self.running.append(self.waiting.popleft())

    def _release_finished(self) -> None:
        """Give all reservations back at once, when the slowest member is done."""
        if all(seq.finished for seq in self.running):
            for seq in self.running:
                self.kv.free(seq)
            self.running = []
