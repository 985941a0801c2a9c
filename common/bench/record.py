"""What an engine did, step by step, written down from outside: engines count, recorders time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from common.batch import Scheduled
from common.bench.memory import head_fits
from common.generate import drive
from common.protocol import (
    Engine,
    EngineStats,
    FinishReason,
    KVUsage,
    Request,
    SampledToken,
    Span,
    StepOutput,
)

Key = tuple[str, int]
"""(request id, index): one sequence."""


@dataclass(frozen=True)
class Computed:
    """One sequence's part in a forward."""

    request_id: str
    index: int
    num_new: int  # tokens computed
    context: int  # tokens that it has after this forward, those included


@dataclass(frozen=True)
class StepRecord:
    """One forward.

    Attributes:
        seconds: when its step was over, since the run began.
        computed: who took part, in batch order.
        usage: KV memory while it ran: everything that it needed allocated, nothing released yet.
            `used` counts the tokens stored before it.
        spans: the same memory, stretch by stretch; empty where the recorder did not look.
        waiting: sequences in the queue, without memory.
        head_fits: whether the first of those would have found room; None when nobody waits, or the recorder
            did not look.
        emitted: sequences that got a token.
        finished: sequences that ended with it.
    """

    seconds: float
    computed: tuple[Computed, ...]
    usage: KVUsage
    spans: tuple[Span, ...] = ()
    waiting: int = 0
    head_fits: bool | None = None
    emitted: tuple[Key, ...] = ()
    finished: tuple[Key, ...] = ()


@dataclass
class Run:
    """A whole run: what went in, what came out, and each step between.

    All times are seconds since the run began.
    """

    steps: list[StepRecord]
    stats: EngineStats
    max_num_seqs: int
    added: dict[str, float] = field(default_factory=dict)  # request id -> when it came
    token_times: dict[Key, list[float]] = field(default_factory=dict)
    token_ids: dict[Key, list[int]] = field(default_factory=dict)
    finish_reasons: dict[Key, FinishReason] = field(default_factory=dict)
    seconds: float = 0.0


class Recorder:
    """Watches an engine from its executor's place, where a step's memory is all there and none is gone yet.

    Args:
        engine: its `executor` is wrapped for as long as `run` lasts.
        memory_every: look at every stretch of KV memory at the first forward and each so many forwards on;
            0 never looks.  Maps need 1.  It is the only part that costs anything (tens of microseconds for
            a few sequences, a millisecond for a thousand blocks).
        clock: seconds, monotonic.
    """

    def __init__(
        self, engine: Engine, memory_every: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine = engine
        self.memory_every = memory_every
        self._forwards = 0
        self.clock = clock
        self._executor = engine.executor
        self._seen: StepRecord | None = None

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """Run the forward, then look around before the engine goes on; see `Executor.execute`."""
        sampled = self._executor.execute(scheduled)
        self._seen = self._look(scheduled)
        return sampled

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[list[StepOutput]], None] | None = None,
        arrivals: Seq[float] | None = None,
        follow: Callable[[list[StepOutput]], Iterable[Request]] = lambda outputs: (),
    ) -> Run:
        """Serve the requests to the end.

        Args:
            requests: added in this order.
            on_step: told what each step brought, for progress bars.
            arrivals: when each comes, see `drive`; None means that all are there from the start.  A request
                waits from then on, also while a step keeps it from being added.
            follow: told what each step brought; the requests that come in answer to it.

        Raises:
            InvalidValue: a request can never be served.
        """
        engine, start = self.engine, self.clock()
        run = Run(steps=[], stats=engine.stats, max_num_seqs=engine.config.max_num_seqs)
        engine.executor = self
        try:
            todo = list(requests)
            for request, arrival in zip(todo, arrivals or [0.0] * len(todo), strict=True):
                run.added[request.request_id] = arrival
            for outputs in drive(engine, todo, arrivals):
                self._note(run, outputs, self.clock() - start)
                if on_step is not None:
                    on_step(outputs)
                for request in follow(outputs):
                    run.added[request.request_id] = self.clock() - start
                    engine.add_request(request)
        finally:
            engine.executor = self._executor
        run.seconds = self.clock() - start
        return run

    def _look(self, scheduled: Scheduled) -> StepRecord:
        engine = self.engine
        computed = tuple(
            Computed(seq.request_id, seq.index, n, seq.num_computed_tokens + n) for seq, n in scheduled
        )
        look = bool(self.memory_every) and self._forwards % self.memory_every == 0
        self._forwards += 1
        spans = tuple(engine.kv.spans()) if look else ()
        taking_part = {id(seq) for seq, _ in scheduled}
        queue = [
            seq for seq in engine.sequences() if not seq.num_computed_tokens and id(seq) not in taking_part
        ]
        fits = head_fits(engine, queue[0], spans) if queue and look else None
        return StepRecord(0.0, computed, engine.kv.usage(), spans, len(queue), fits)

    def _note(self, run: Run, outputs: list[StepOutput], now: float) -> None:
        emitted, finished = [], []
        for output in outputs:
            key = (output.request_id, output.index)
            run.token_ids.setdefault(key, []).extend(output.new_token_ids)
            run.token_times.setdefault(key, []).extend([now] * len(output.new_token_ids))
            if output.new_token_ids:
                emitted.append(key)
            if output.finish_reason is not None:
                finished.append(key)
                run.finish_reasons[key] = output.finish_reason
        if self._seen is not None:
            seen, self._seen = self._seen, None
            run.steps.append(replace(seen, seconds=now, emitted=tuple(emitted), finished=tuple(finished)))
