"""The slab alone: first-fit against a plain list of slots, both reservations, refusals with the numbers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.scripted import ScriptedModel

from common.batch import ForwardBatch
from common.config import EngineConfig
from common.errors import InvalidValue
from common.protocol import Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from stage2_kvcache.kv_cache import ContiguousCache

MODEL = ScriptedModel({})
BYTES_PER_TOKEN = 2 * 8 * 8  # K and V of one head of 8, one layer, float64


def cache(slots: int, max_model_len: int = 64, reservation: str = "max_tokens") -> ContiguousCache:
    """A slab of so many slots (and some bytes that make no whole slot)."""
    kv_bytes = slots * BYTES_PER_TOKEN + BYTES_PER_TOKEN - 1
    return ContiguousCache(
        MODEL, EngineConfig(kv_bytes=kv_bytes, max_model_len=max_model_len, reservation=reservation)
    )


def sequence(prompt: int, max_tokens: int | None, name: str = "a") -> Sequence:
    """A sequence that asks for so much."""
    return Sequence(Request(name, (1,) * prompt, SamplingParams(max_tokens=max_tokens)))


@pytest.mark.parametrize(
    ("reservation", "prompt", "max_tokens", "slots"),
    [
        ("max_tokens", 5, 3, 8),
        ("max_tokens", 5, 59, 64),
        ("max_tokens", 5, 60, 64),  # the context ends there
        ("max_tokens", 5, None, 64),
        ("max_model_len", 5, 3, 64),
        ("max_model_len", 5, None, 64),
    ],
)
def test_what_a_request_reserves(reservation, prompt, max_tokens, slots):
    """Its own prompt + max_tokens but never more than the context; or always the whole context."""
    kv = cache(200, reservation=reservation)
    seq = sequence(prompt, max_tokens)
    assert kv.allocate(seq) == 0
    assert kv.usage().reserved == slots
    assert (kv.usage().used, kv.usage().free) == (0, 200 - slots)
    assert kv.allocate(sequence(prompt, max_tokens)) == slots


@pytest.mark.parametrize(("reservation", "need"), [("max_tokens", 26), ("max_model_len", 64)])
def test_refusal_says_how_much_is_needed_and_how_much_there_is(reservation, need):
    """B46: what an empty slab cannot hold is refused by name, in bytes and in tokens."""
    kv = cache(need - 1, reservation=reservation)
    with pytest.raises(InvalidValue) as error:
        kv.check_fits(sequence(20, 6).request)
    assert error.value.field == "kv_bytes"
    for number in (f"at least {need * BYTES_PER_TOKEN} ", f"{need} tokens", f"{need - 1} tokens fit"):
        assert number in str(error.value)
    kv = cache(need, reservation=reservation)
    kv.check_fits(sequence(20, 6).request)
    assert kv.allocate(sequence(20, 6)) == 0


def test_a_gap_between_two_fits_nobody_larger():
    """External fragmentation: 6 + 6 slots are free and a request for 8 finds no place."""
    kv = cache(20)
    a, b, c = (sequence(5, size - 5, str(size)) for size in (6, 8, 6))
    assert [kv.allocate(seq) for seq in (a, b, c)] == [0, 6, 14]
    kv.free(a), kv.free(c)
    kv.free(a)  # B08: a second time is a no-op
    assert kv.usage().free == 12
    assert kv.allocate(sequence(5, 3)) is None
    assert kv.usage().free == 12, "a refusal takes nothing"
    assert kv.allocate(sequence(5, 1)) == 0


def test_answers_of_one_request_have_their_own_stretches():
    """One of two is given back, the other stays."""
    kv = cache(40)
    request = sequence(3, 4).request
    first, second = Sequence(request, 0), Sequence(request, 1)
    assert [kv.allocate(first), kv.allocate(second)] == [0, 7]
    kv.free(first)
    assert [(span.index, span.start) for span in kv.spans()] == [(1, 7)]


def test_slots_are_start_plus_position():
    """Two sequences, one of them further on: no slot twice, each inside its own stretch."""
    kv = cache(40)
    first, gone, second = sequence(3, 4, "a"), sequence(2, 2, "b"), sequence(4, 4, "c")
    starts = [kv.allocate(seq) for seq in (first, gone, second)]
    assert starts == [0, 7, 11]
    kv.free(gone)
    first.token_ids.append(1)
    first.num_computed_tokens = 3
    scheduled = [(second, 4), (first, 1)]
    batch = ForwardBatch.pack(scheduled)
    kv.prepare(batch, scheduled)
    assert batch.slot_mapping.tolist() == [11, 12, 13, 14, 3]


class Slab(RuleBasedStateMachine):
    """Reserve and free in any order; a list with a name per slot says what must be."""

    SLOTS = 30

    def __init__(self) -> None:
        super().__init__()
        self.kv = cache(self.SLOTS)
        self.slots: list[Sequence | None] = [None] * self.SLOTS
        self.seqs: list[Sequence] = []

    @rule(prompt=st.integers(1, 12), max_tokens=st.integers(1, 12))
    def reserve(self, prompt: int, max_tokens: int) -> None:
        """The first gap that is long enough, or None if there is none."""
        size = prompt + max_tokens
        want = next((start for start in range(self.SLOTS - size + 1)
                     if all(slot is None for slot in self.slots[start : start + size])), None)  # fmt: skip
        seq = sequence(prompt, max_tokens, str(len(self.seqs)))
        assert self.kv.allocate(seq) == want
        if want is not None:
            self.seqs.append(seq)
            self.slots[want : want + size] = [seq] * size

    @rule(which=st.integers(0, 30))
    def free(self, which: int) -> None:
        """Any of those that have ever been there."""
        if which < len(self.seqs):
            seq = self.seqs[which]
            self.kv.free(seq)
            self.slots = [None if slot is seq else slot for slot in self.slots]

    @rule(which=st.integers(0, 30), used=st.integers(0, 12))
    def compute(self, which: int, used: int) -> None:
        """Some of the reserved slots come to hold a token."""
        if which < len(self.seqs):
            self.seqs[which].num_computed_tokens = min(used, self.slots.count(self.seqs[which]))

    @invariant()
    def spans_are_the_slots(self) -> None:
        """Disjoint, in bounds, in slot order; usage adds them up."""
        shown: list[str | None] = [None] * self.SLOTS
        for span in self.kv.spans():
            assert 0 <= span.start <= span.start + span.reserved <= self.SLOTS
            for slot in range(span.start, span.start + span.reserved):
                assert shown[slot] is None
                shown[slot] = span.request_id
        assert shown == [slot and slot.request_id for slot in self.slots]
        starts = [span.start for span in self.kv.spans()]
        assert starts == sorted(starts)
        usage = self.kv.usage()
        assert usage.reserved == self.SLOTS - self.slots.count(None)
        assert usage.used == sum(s.num_computed_tokens for s in self.seqs if s in self.slots)
        assert (usage.capacity, usage.bytes_per_token) == (self.SLOTS, BYTES_PER_TOKEN)


TestSlab = Slab.TestCase
TestSlab.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
