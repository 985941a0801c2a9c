"""Stage 1: what recomputing everything costs, to the token, and that nothing is remembered."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run, tokens
from support.scripted import EOS, ScriptedModel
from support.watching import Watch

from common.batch import ForwardBatch
from common.protocol import KVUsage, Request
from common.sequence import Sequence
from stage1_naive.no_cache import NoCache

SCRIPTS = {m: (4, list(range(m + 10, m + 40))) for m in (3, 4, 5)} | {6: (4, [20, 21, EOS])}


def prompt(marker: int, length: int = 4) -> list[int]:
    """The marker and filler."""
    return [marker] + [50] * (length - 1)


def engine_over(**options):
    """Stage 1 over the scripted model."""
    return build("stage1_naive", ScriptedModel(SCRIPTS), **options)


@pytest.mark.parametrize("p", [1, 2, 7, 30])
@pytest.mark.parametrize("n", [1, 2, 5, 24])
def test_cost_of_one_answer(p, n):
    """An answer of n tokens to a prompt of p costs n * p + n * (n - 1) / 2 token forwards."""
    engine = engine_over()
    said = run(engine, [ask("a", prompt(9, p), max_tokens=n)])["a"]
    assert engine.stats.tokens_computed == said[-1].counters.tokens_computed == n * p + n * (n - 1) // 2
    assert engine.stats.forwards == said[-1].counters.forwards == n
    assert engine.stats.tokens_emitted == n


def test_cost_of_a_crowd_is_the_sum():
    """Also for an answer that ends itself: three tokens, not the eight it was allowed."""
    engine = engine_over()
    run(engine, [ask("a", prompt(3), max_tokens=5), ask("b", prompt(6)), ask("c", prompt(4), max_tokens=1)])
    assert engine.stats.tokens_computed == (5 * 4 + 10) + (3 * 4 + 3) + 4
    assert engine.stats.computed_per_emitted == pytest.approx(49 / 9)


def test_one_at_a_time_first_come_first_served():
    """Each forward is one request's whole prefix; the next request begins when it is done."""
    engine = engine_over(max_num_seqs=8)
    watch = Watch(engine)
    run(engine, [ask(name, prompt(m), max_tokens=2) for name, m in (("z", 3), ("a", 5), ("m", 4))])
    assert [forward.parts for forward in watch.forwards] == [
        [("z", 4)], [("z", 5)], [("a", 4)], [("a", 5)], [("m", 4)], [("m", 5)],
    ]  # fmt: skip
    assert all(f.positions == list(range(f.parts[0][1])) and f.slots == [] for f in watch.forwards)


def test_the_next_one_starts_when_the_running_one_is_taken_back():
    """No step is lost, and order is kept."""
    engine = engine_over()
    for name, marker in (("a", 3), ("b", 4), ("c", 5)):
        engine.add_request(ask(name, prompt(marker), max_tokens=2))
    engine.step()
    engine.abort("a")
    [output] = engine.step()
    assert (output.request_id, tokens([output])) == ("b", [14])


def test_nothing_is_kept():
    """No slot is ever reserved."""
    engine = engine_over()
    engine.add_request(ask("a", prompt(3)))
    while engine.has_unfinished():
        engine.step()
        assert engine.kv.usage() == KVUsage(0, 0, 0, 0)
        assert engine.kv.spans() == []


@pytest.mark.parametrize(("computed", "num_new"), [(1, 4), (4, 1), (2, 1)])
def test_no_cache_refuses_a_part_of_a_sequence(tiny_config, computed, num_new):
    """What is not in the forward does not exist, so attention over it would be wrong without a word."""
    whole, part = (Sequence(Request(name, (5, 6, 7, 8, 9))) for name in ("whole", "part"))
    part.num_computed_tokens = computed
    kv = NoCache(tiny_config)
    scheduled = [(whole, 5), (part, num_new)]
    with pytest.raises(ValueError, match="from its first token"):
        kv.prepare(ForwardBatch.pack(scheduled), scheduled)
    scheduled = scheduled[:1]
    kv.prepare(ForwardBatch.pack(scheduled), scheduled)
