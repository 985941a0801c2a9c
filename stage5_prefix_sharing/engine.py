"""Stage 5: the same batches, and equal blocks held once: prefixes, parallel samples, beams."""

from __future__ import annotations

from common.batch import Scheduled
from common.config import EngineConfig
from common.lifecycle import abort_matching, advance, check_in
from common.protocol import Capabilities, EngineStats, Executor, Model, Request, StepOutput
from common.runner import ModelExecutor
from common.sequence import Sequence
from stage5_prefix_sharing.beam_groups import BeamGroups
from stage5_prefix_sharing.kv_cache import SharingCache
from stage5_prefix_sharing.scheduler import Scheduler


def make_engine(model: Model, config: EngineConfig) -> SharingEngine:
    """Build the engine over a model."""
    kv = SharingCache(model, config)
    return SharingEngine(model, config, kv, ModelExecutor(model, kv, config))


class SharingEngine:
    """A request enters as soon as there is a place, and leaves the moment it ends.

    Prompts and decodes share each forward, under a budget of tokens; a long prompt is computed in chunks.
    What to compute is the scheduler's decision, where K/V lies is the cache's; the engine only does it.
    """

    capabilities = Capabilities(
        remembers_kv=True,
        batches=True,
        paged=True,
        preempts=True,
        continuous=True,
        chunks_prompts=True,
        shares_prefixes=True,
        beam_search=True,
    )

    def __init__(self, model: Model, config: EngineConfig, kv: SharingCache, executor: Executor) -> None:
        self.model = model
        self.config = config
        self.kv = kv
        self.executor = executor
        self.stats = EngineStats(cache=kv.blocks.pool.counters)
        self.live: dict[str, list[Sequence]] = {}
        self.scheduler = Scheduler(config, kv.blocks)
        self.beams = BeamGroups(self, self.scheduler)
        self.last_batch: Scheduled = []

    def add_request(self, request: Request) -> None:
        """Queue a request; see `Engine.add_request`."""
        if request.beam is not None:
            self.beams.add(request)
            return
        leader, *followers = check_in(self, request)
        self.scheduler.add(leader)
        for seq in followers:
            self.scheduler.add(seq, None if leader.wants_prompt_logprobs else leader)

    def abort(self, request_id: str, index: int | None = None) -> list[StepOutput]:
        """Take a request, or one of its answers, back; see `Engine.abort`."""
        if request_id in self.beams:
            outputs = self.beams.abort(request_id, index)
        else:
            outputs = abort_matching(self, request_id, index)
        self.scheduler.drop_aborted()
        return outputs

    def step(self) -> list[StepOutput]:
        """Compute what the scheduler chose: a token, a chunk or a whole prompt of each."""
        scheduled = self.scheduler.schedule()
        self.stats.preemptions = self.scheduler.num_preemptions
        if not scheduled:
            return []
        sampled = self.beams.collect(scheduled, self.executor.execute(scheduled))
        outputs = advance(self, scheduled, sampled)
        self.kv.blocks.publish(scheduled)
        outputs += self.beams.select()
        self.scheduler.release_finished()
        return outputs

    def has_unfinished(self) -> bool:
        """Whether another step would do something."""
        return bool(self.live)

    def sequences(self) -> list[Sequence]:
        """The unfinished sequences, running first."""
        return self.scheduler.sequences()
