"""The PagedAttention paper's split of KV memory (its Fig. 2), counted after the fact from a run's records.

At each forward, every slot of KV memory is one of:

* **token states**: K/V of a token of an unfinished sequence.  The only slots that do any good.
* **reservation**: reserved and still empty, but its sequence will get there.
* **internal**: reserved for nothing: the sequence ends before it gets there, or has ended already and its
  memory is still kept for the batch's sake.
* **external**: free while requests wait, and of no use to the first of them: too small a gap, too few blocks.
* **rest**: free, because nobody waits, or because the stage takes nobody in now.

Only the future tells reservation from internal, so the records are read backwards.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from common.protocol import Engine, Span
from common.sequence import Sequence

if TYPE_CHECKING:
    from common.bench.record import Key, Run, StepRecord


@dataclass(frozen=True)
class Split:
    """Shares of KV memory; they add up to the capacity (slots), or to 1 (see `share`)."""

    token_states: float = 0.0
    reservation: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(astuple(self))

    @property
    def allocated(self) -> float:
        """What sequences hold."""
        return self.token_states + self.reservation + self.internal

    @property
    def efficiency(self) -> float:
        """Share of the allocated memory that holds token states."""
        return self.token_states / self.allocated if self.allocated else 0.0

    @property
    def share(self) -> Split:
        """The same as fractions of the capacity."""
        return Split(*(value / self.total for value in astuple(self))) if self.total else self


def split_steps(run: Run) -> dict[int, Split]:
    """The split, in slots, of each forward at which the recorder looked at memory.

    A sequence's tokens are counted after the forward (`Computed.context`), since their slots are written by
    it.  A sequence that loses its memory (preemption) and gets memory again later starts anew: what it will
    use then says nothing about what it held before.
    """
    ended_at = {key: number for number, step in enumerate(run.steps) for key in step.finished}
    splits: dict[int, Split] = {}
    future = _Future()
    for number in range(len(run.steps) - 1, -1, -1):
        step = run.steps[number]
        held, stored = _per_sequence(step)
        needed = {key: future.most_stored(key, stored[key]) for key in held}
        for part in step.computed:
            future.see((part.request_id, part.index), part.context - part.num_new, part.context)
        if not step.spans:
            continue
        alive = [key for key in held if ended_at.get(key, number) >= number]
        states = sum(stored[key] for key in alive)
        useful = sum(min(needed[key], held[key]) for key in alive)
        reserved = step.usage.reserved
        free = step.usage.capacity - reserved
        unusable = free if step.head_fits is False else 0
        splits[number] = Split(states, useful - states, reserved - useful, unusable, free - unusable)
    return dict(sorted(splits.items()))


class _Future:
    """Read backwards: how many tokens each sequence will store before it next gives its memory back."""

    def __init__(self) -> None:
        self.start: dict[Key, int] = {}  # first position of its next forward
        self.most: dict[Key, int] = {}

    def see(self, key: Key, start: int, context: int) -> None:
        """A forward that computed positions `start ... context - 1`, before all that were seen."""
        self.most[key] = self.most_stored(key, context)
        self.start[key] = start

    def most_stored(self, key: Key, stored: int) -> int:
        """The most that a sequence with so many tokens will come to store without a break.

        It has been interrupted if its next forward begins below what it has.
        """
        unbroken = key in self.start and stored <= self.start[key]
        return max(stored, self.most[key]) if unbroken else stored


def mean_split(run: Run, loaded: bool = True) -> Split | None:
    """The mean over forwards, in slots; None if no memory was seen.

    Args:
        run: recorded with `memory_every` of at least 1.
        loaded: only forwards while requests wait, which is when memory is short (all of them if nobody
            ever waits): the last batches of a trace would dilute what the paper shows under load.
    """
    chosen = split_steps(run)
    if loaded and any(run.steps[number].waiting for number in chosen):
        chosen = {number: split for number, split in chosen.items() if run.steps[number].waiting}
    if not chosen:
        return None
    columns = zip(*(astuple(split) for split in chosen.values()), strict=True)
    return Split(*(sum(column) / len(chosen) for column in columns))


def head_fits(engine: Engine, head: Sequence, spans: Seq[Span]) -> bool:
    """Whether the free memory would take the first sequence of the queue, by the stage's own rule.

    A contiguous cache needs one gap as long as the reservation, a paged one enough blocks for the tokens it
    has and one to grow into.  What else may keep it out (places, token budget, a closed batch) is no matter
    of memory and does not count.
    """
    usage, config = engine.kv.usage(), engine.config
    length, params = len(head.token_ids), head.params
    if engine.capabilities.paged:
        blocks = -(-length // config.block_size) + (1 if spans else 0)
        return usage.free >= blocks * config.block_size
    need = config.max_model_len
    if config.reservation == "max_tokens" and params.max_tokens is not None:
        need = min(head.num_prompt_tokens + params.max_tokens, need)
    return largest_gap(spans, usage.capacity) >= need


def largest_gap(spans: Seq[Span], capacity: int) -> int:
    """Longest free stretch of slots; `spans` in slot order."""
    largest = end = 0
    for span in spans:
        largest = max(largest, span.start - end)
        end = span.start + span.reserved
    return max(largest, capacity - end)


def _per_sequence(step: StepRecord) -> tuple[dict[Key, int], dict[Key, int]]:
    """Slots held, and tokens stored in them after the forward, of each sequence with memory."""
    held: dict[Key, int] = {}
    stored: dict[Key, int] = {}
    for span in step.spans:
        key = (span.request_id, span.index)
        held[key] = held.get(key, 0) + span.reserved
        stored[key] = stored.get(key, 0) + span.used
    for part in step.computed:
        key = (part.request_id, part.index)
        if key in held:
            stored[key] = part.context
    return held, stored
