"""The PagedAttention paper's split of KV memory (its Fig. 2), counted after the fact from a run's records.

At each forward, every slot of KV memory is one of:

* **token states**: K/V of a token of an unfinished sequence.  The only slots that do any good.
* **reservation**: reserved and still empty, but its sequence will get there.
* **internal**: reserved for nothing: the sequence ends before it gets there, or has ended already and its
  memory is still kept for the batch's sake.
* **external**: free while requests wait, and of no use to the first of them: too small a gap, too few blocks.
* **rest**: free, because nobody waits, or because the stage takes nobody in now.

Only the future tells reservation from internal, so the records are read backwards.

A block that several sequences share counts once, under whichever of them the cache names (`KVBackend.spans`).
Nobody writes into a shared block, so what a sequence stores anew lies in blocks that are its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

from common.protocol import Engine, KVUsage, Span
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

    Tokens are counted after the forward, since their slots are written by it.  A sequence that loses its
    memory (preemption) and gets memory again later starts anew: what it will use then says nothing about
    what it held before.
    """
    ended_at = {key: number for number, step in enumerate(run.steps) for key in step.finished}
    splits: dict[int, Split] = {}
    future = _Future()
    for number in range(len(run.steps) - 1, -1, -1):
        step = run.steps[number]
        held, stored, context = _per_sequence(step)
        to_come = {key: future.most_stored(key, context[key]) - context[key] for key in held}
        for part in step.computed:
            future.see((part.request_id, part.index), part.context - part.num_new, part.context)
        if not step.spans:
            continue
        alive = [key for key in held if ended_at.get(key, number) >= number]
        states = sum(stored[key] for key in alive)
        useful = sum(min(stored[key] + to_come[key], held[key]) for key in alive)
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

    A contiguous cache needs one gap as long as the reservation, a paged one enough blocks.  What else may
    keep it out (places, token budget, a closed batch) is no matter of memory and does not count.
    """
    usage, config = engine.kv.usage(), engine.config
    if engine.capabilities.paged:
        return usage.free >= _blocks_to_enter(engine, head, usage) * config.block_size
    need, params = config.max_model_len, head.params
    if config.reservation == "max_tokens" and params.max_tokens is not None:
        need = min(head.num_prompt_tokens + params.max_tokens, need)
    return largest_gap(spans, usage.capacity) >= need


def _blocks_to_enter(engine: Engine, head: Sequence, usage: KVUsage) -> int:
    """Blocks that must be free before a paged stage lets the head of its queue in.

    Beside others: stage 3 wants one more than the tokens fill; later stages want the watermark, and what
    those who run have still to come for.  Blocks that the head would share with them cost nothing.
    """
    size = engine.config.block_size
    need = -(-len(head.token_ids) // size)
    running = [seq for seq in engine.sequences() if seq.block_table]
    if engine.capabilities.shares_prefixes:
        blocks: SharingBlocks = engine.kv.blocks  # type: ignore[attr-defined]  # of such stages only
        need -= blocks.num_held(blocks.match(head))
    if not running:
        return need
    if not engine.capabilities.continuous:
        return need + 1
    lacking = sum(-(-len(seq.token_ids) // size) - len(seq.block_table) for seq in running)
    return need + lacking + max(1, int(engine.config.watermark * (usage.capacity // size)))


class SharingBlocks(Protocol):
    """Of a cache that shares blocks: what is there of a sequence's beginning, and how much of that is held."""

    def match(self, seq: Sequence) -> list[int]:
        """Blocks that hold its beginning."""
        ...

    def num_held(self, blocks: Seq[int]) -> int:
        """How many of them somebody holds."""
        ...


def largest_gap(spans: Seq[Span], capacity: int) -> int:
    """Longest free stretch of slots; `spans` in slot order."""
    largest = end = 0
    for span in spans:
        largest = max(largest, span.start - end)
        end = span.start + span.reserved
    return max(largest, capacity - end)


def _per_sequence(step: StepRecord) -> tuple[dict[Key, int], dict[Key, int], dict[Key, int]]:
    """Of each sequence with memory of its own: slots held, tokens in them and tokens in all, after the forward."""
    held: dict[Key, int] = {}
    stored: dict[Key, int] = {}
    for span in step.spans:
        key = (span.request_id, span.index)
        held[key] = held.get(key, 0) + span.reserved
        stored[key] = stored.get(key, 0) + span.used
    context = stored.copy()
    for part in step.computed:
        key = (part.request_id, part.index)
        if key in held:
            stored[key] += part.num_new
            context[key] = part.context
    return held, stored, context
