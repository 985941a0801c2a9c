"""Which tokens of which sequences the next forward computes.  Decided anew at every step, without a tensor.

There is no prefill phase and no decode phase.  A sequence has `num_computed_tokens`, and each step gives it
some of the tokens it lacks; a sequence that lacks exactly one is what others call decoding:

                    num_computed_tokens        len(token_ids)
    prompt chunk    |==========>...............|      several lacking, a part of them now
    decode          |=========================>|      one lacking
    resumed         |>.........................|      all lacking: its memory was taken, its tokens were not

So chunked prefill, mixed batches and resuming after preemption are all the same line of code.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import chain

from common.batch import Scheduled
from common.config import EngineConfig
from common.errors import InvalidValue
from common.sequence import Sequence
from stage5_prefix_sharing.block_tables import SharingTables

Rank = tuple[int, int]

POLICIES: dict[str, Callable[[Sequence, int], Rank]] = {
    "fcfs": lambda seq, arrival: (0, arrival),
    "priority": lambda seq, arrival: (seq.request.priority, arrival),
}
"""Who goes first: the smaller rank.  "fcfs" cannot starve anyone; "priority" can, which is its purpose."""


class Scheduler:
    """Two queues under one order of rank, and the rules by which a sequence moves between them.

    1. Running sequences come first, best rank first.  Each may take what it lacks, but leaves one token of
       the step's budget to everyone behind it: a long prompt never stops another's decode.
    2. When blocks run out, the running sequence of the worst rank loses its blocks and waits again.  Its
       rank is unchanged, so it stands before all that came later.
    3. Then waiting sequences enter, strictly in order: nobody overtakes a head that does not fit, so no
       stream of short requests can starve a long one.  Nobody enters in a step that took blocks away.

    4. A request's first sequence computes the prompt, and the others are forked from it in the forward that
       completes it: they compute nothing there, and draw their first tokens from the same logits.
    5. Nobody computes what another computes in the very same step: the head of the queue waits for it, and finds
       it in the cache one step later.
    6. A beam whose next tokens are known is parked until those of its whole search are.  It takes no place in
       the batch, and its blocks are the first to go: then its search can go on with memory for one beam.

    Under "fcfs" the oldest sequence is never the victim and gains at least a token per step, so all requests
    end within as many steps as they have tokens, prompts and answers together.
    """

    def __init__(self, config: EngineConfig, blocks: SharingTables) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise InvalidValue(
                "max_num_batched_tokens",
                config.max_num_batched_tokens,
                f"at least max_num_seqs={config.max_num_seqs}: every sequence gains a token per step",
            )
        self.config = config
        self.blocks = blocks
        self.rank_of = POLICIES[config.policy]
        self.watermark = max(1, int(config.watermark * blocks.pool.num_blocks))
        self.num_arrived = 0
        self.num_preemptions = 0
        self.ranks: dict[Sequence, Rank] = {}
        self.waiting: list[tuple[Rank, Sequence]] = []  # a heap
        self.running: list[Sequence] = []  # best rank first
        self.parked: list[Sequence] = []  # beams that wait for the rest of their search, best rank first
        self.followers: dict[Sequence, list[Sequence]] = {}  # those that wait for this one's prompt

    def add(self, seq: Sequence, leader: Sequence | None = None) -> None:
        """Let a new sequence wait for its turn, or for the leader to have computed their prompt."""
        self.ranks[seq] = self.rank_of(seq, self.num_arrived)
        self.num_arrived += seq.request.beam.beam_width if seq.request.beam else 1  # a rank for each beam
        if leader is None:
            heappush(self.waiting, (self.ranks[seq], seq))
        else:
            self.followers.setdefault(leader, []).append(seq)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Decide the next forward: (sequence, how many of its tokens), the blocks already in their tables."""
        preemptions_before = self.num_preemptions
        scheduled: list[tuple[Sequence, int]] = []
        budget = self.config.max_num_batched_tokens
        while len(scheduled) < len(self.running):  # may shrink as we go, from its far end
            seq = self.running[len(scheduled)]
            behind = len(self.running) - len(scheduled) - 1
            num_new = min(len(seq.token_ids) - seq.num_computed_tokens, budget - behind)
            if not self._make_room(seq, seq.num_computed_tokens + num_new):
                break
            scheduled.append((seq, num_new))
            scheduled += self._fork(seq, num_new)
            budget -= num_new
        if self.num_preemptions == preemptions_before:
            scheduled += self._admit(budget, scheduled)
        return scheduled

    def park(self, seq: Sequence) -> None:
        """Let a running beam that lacks nothing wait, with its blocks, for the rest of its search."""
        self.running.remove(seq)
        insort(self.parked, seq, key=self.ranks.__getitem__)

    def fork(self, parent: Sequence, beam: Sequence) -> None:
        """Let a beam go on from its parked parent: in its blocks, if it has any and there is a place, else later."""
        priority, arrival = self.ranks[parent]
        self.ranks[beam] = (priority, arrival - parent.index + beam.index)
        if parent.block_table and len(self.running) < self.config.max_num_seqs:
            self.blocks.fork(parent, beam)
            beam.num_computed_tokens = parent.num_computed_tokens
            insort(self.running, beam, key=self.ranks.__getitem__)
        else:
            heappush(self.waiting, (self.ranks[beam], beam))

    def release_finished(self) -> None:
        """Free the blocks and places of sequences that have ended."""
        for seq in (*self.running, *self.parked):
            if seq.finished:
                self.blocks.free(seq)
                del self.ranks[seq]
        self.running = [seq for seq in self.running if not seq.finished]
        self.parked = [seq for seq in self.parked if not seq.finished]

    def drop_aborted(self) -> None:
        """Let go of sequences that were taken back; one that waits is passed over when its turn comes."""
        for leader in [leader for leader in self.followers if leader.finished]:
            self._pass_leadership(leader)
        self.release_finished()
        self._pass_over_aborted()

    def sequences(self) -> list[Sequence]:
        """All unfinished sequences: running, then parked, then waiting, each in order of rank."""
        waiting = [*(seq for _, seq in self.waiting), *chain.from_iterable(self.followers.values())]
        waiting.sort(key=self.ranks.__getitem__)
        return [*self.running, *self.parked, *(seq for seq in waiting if not seq.finished)]

    def _pass_over_aborted(self) -> None:
        """Make the head of the queue someone who still wants in."""
        while self.waiting and self.waiting[0][1].finished:
            del self.ranks[heappop(self.waiting)[1]]

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for so many tokens, from the worst rank's if need be; False if that is itself.

        A sequence that runs alone always finds room: an answer ends before it outgrows the whole pool.
        """
        while self.blocks.allocate(seq, num_tokens) is None:
            if self._strip_parked():
                continue
            victim = self.running.pop()
            self._take_blocks(victim)
            heappush(self.waiting, (self.ranks[victim], victim))
            if victim is seq:
                return False
        return True

    def _strip_parked(self) -> bool:
        """Take the blocks of the parked beam of the worst rank that has any; False if none has.

        It stays parked: its next tokens are known, so it would only be computed again for nothing.
        """
        for beam in reversed(self.parked):
            if beam.block_table:
                self._take_blocks(beam)
                return True
        return False

    def _take_blocks(self, victim: Sequence) -> None:
        self.blocks.free(victim)
        victim.num_computed_tokens = 0
        victim.counters.preemptions += 1
        self.num_preemptions += 1

    def _admit(self, budget: int, scheduled: Scheduled) -> list[tuple[Sequence, int]]:
        """Let waiting sequences in, in order, while places, budget and blocks last."""
        admitted: list[tuple[Sequence, int]] = []
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return admitted
        # Blocks that running prompts have still to come for.  Those let in below add none: a prompt that does
        # not get all of its tokens has used up the budget.
        promised = sum(self._blocks_lacking(seq) for seq in self.running)
        due = self.blocks.names_due(scheduled)
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0][1]
            hit = self.blocks.match(seq)
            if self.blocks.name_missing(seq, hit) in due:
                break
            # A hit that lies free is taken from the free blocks as well; one that is held costs nothing.
            need = self.blocks.num_blocks(len(seq.token_ids)) - self.blocks.num_held(hit)
            spare = self.watermark if self.running else 0
            if need + promised + spare > self.blocks.pool.num_free:
                if not self.running and self._strip_parked():
                    continue
                break
            heappop(self.waiting)
            self._pass_over_aborted()
            self.blocks.reuse(seq, hit)
            num_new = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
            self.blocks.allocate(seq, seq.num_computed_tokens + num_new)
            insort(self.running, seq, key=self.ranks.__getitem__)
            admitted.append((seq, num_new))
            due |= self.blocks.names_due(admitted[-1:])
            admitted += self._fork(seq, num_new)
            budget -= num_new
        return admitted

    def _fork(self, leader: Sequence, num_new: int) -> list[tuple[Sequence, int]]:
        """If so many tokens complete the leader's prompt, let its followers in beside it, with nothing to compute.

        Right behind it in the batch, where the last row is the leader's, they draw from its logits.  Those
        for whom there is no place wait like everyone else, and will find the prompt in the cache.
        """
        forked: list[tuple[Sequence, int]] = []
        if leader not in self.followers or leader.num_computed_tokens + num_new < len(leader.token_ids):
            return forked
        for seq in self._take_followers(leader):
            if len(self.running) < self.config.max_num_seqs:
                self.blocks.fork(leader, seq)
                seq.num_computed_tokens = leader.num_computed_tokens + num_new
                insort(self.running, seq, key=self.ranks.__getitem__)
                forked.append((seq, 0))
            else:
                heappush(self.waiting, (self.ranks[seq], seq))
        return forked

    def _pass_leadership(self, leader: Sequence) -> None:
        """A leader was taken back before it had computed the prompt: the next of its request takes its place."""
        heirs = self._take_followers(leader)
        if heirs:
            heappush(self.waiting, (self.ranks[heirs[0]], heirs[0]))
        if heirs[1:]:
            self.followers[heirs[0]] = heirs[1:]

    def _take_followers(self, leader: Sequence) -> list[Sequence]:
        """Those that still wait for the leader; what was taken back in the meantime is forgotten."""
        followers = self.followers.pop(leader)
        for seq in followers:
            if seq.finished:
                del self.ranks[seq]
        return [seq for seq in followers if not seq.finished]

    def _blocks_lacking(self, seq: Sequence) -> int:
        """Blocks that a sequence's known tokens will fill and that it does not hold yet."""
        return self.blocks.num_blocks(len(seq.token_ids)) - len(seq.block_table)
