"""Look into an engine's steps from its executor's place, and take its memory away at a chosen moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from common.batch import ForwardBatch, Scheduled
from common.model.config import ModelConfig
from common.protocol import Engine, KVBackend, Model, SampledToken, StepOutput


@dataclass
class Forward:
    """One forward: who took part with how many tokens, at which positions and in which slots."""

    parts: list[tuple[str, int]]  # (request id, tokens computed)
    positions: list[int] = field(default_factory=list)  # [T]
    slots: list[int] = field(default_factory=list)  # [T]; empty without a cache


class Watch:
    """Stands in an engine's executor's place and writes its forwards down."""

    def __init__(self, engine: Engine) -> None:
        self.inner, self.kv = engine.executor, engine.kv
        self.forwards: list[Forward] = []
        engine.executor = self

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """Note who computes what; see `Executor.execute`."""
        forward = Forward([(seq.request_id, num_new) for seq, num_new in scheduled])
        self.forwards.append(forward)
        prepare = self.kv.prepare

        def noting(batch: ForwardBatch, scheduled: Scheduled) -> None:
            prepare(batch, scheduled)
            forward.positions, forward.slots = batch.positions.tolist(), batch.slot_mapping.tolist()

        self.kv.prepare = noting  # type: ignore[method-assign]
        try:
            return self.inner.execute(scheduled)
        finally:
            self.kv.prepare = prepare  # type: ignore[method-assign]

    @property
    def order(self) -> list[str]:
        """Request ids in the order in which they were first computed."""
        return list(dict.fromkeys(name for forward in self.forwards for name, _ in forward.parts))


@dataclass
class Listening:
    """A model whose logits are kept: `heard` has those of the last rows, forward by forward."""

    model: Model
    heard: list[torch.Tensor] = field(default_factory=list)

    @property
    def config(self) -> ModelConfig:
        """See `Model`."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """See `Model`."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """See `Model`."""
        return self.model.device

    def forward(self, batch: ForwardBatch, kv: KVBackend) -> torch.Tensor:
        """See `Model.forward`."""
        logits = self.model.forward(batch, kv)
        self.heard.append(logits.clone())
        return logits


def starve(engine: Engine, after: Collection[int]) -> None:
    """Leave a lone sequence without a free block in the step after it has so many output tokens.

    It is preempted if that step's token opens a block (that is the test's to arrange), once for each number.
    """
    todo, plain_step, pool = set(after), engine.step, engine.kv.blocks.pool

    def step() -> list[StepOutput]:
        [seq] = engine.sequences() or [None]
        if seq is None or seq.num_output_tokens not in todo:
            return plain_step()
        todo.remove(seq.num_output_tokens)
        hostages = pool.allocate(pool.num_free)
        try:
            return plain_step()
        finally:
            pool.free(hostages)

    engine.step = step  # type: ignore[method-assign]
