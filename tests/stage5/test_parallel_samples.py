"""`n` answers of one prompt: computed once, held once, parted at the first write; each as if it were alone."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run, tokens
from support.invariants import check_drained, check_memory, poison_free_memory
from tagged import TaggedModel

from common.protocol import Engine, FinishReason, Request, StepOutput

MODEL = TaggedModel()
SAMPLED = {"temperature": 1.0, "seed": 4}


def engine_of(num_blocks: int = 64, stage: str = "stage5_prefix_sharing", **options: object) -> Engine:
    """An engine with so many blocks of 4."""
    return build(stage, MODEL, kv_tokens=4 * num_blocks, **options)


def samples(length: int, n: int, name: str = "a", **params: object) -> Request:
    """A prompt of so many tokens and `n` sampled answers to it."""
    prompt = [(3 * i * i + i + 5) % 64 for i in range(length)]
    return ask(name, prompt, n=n, **(SAMPLED | {"max_tokens": 8} | params))


def finish(engine: Engine, said: list[StepOutput]) -> list[StepOutput]:
    """Step to the end, all invariants at every step; all that was said, `said` before it."""
    while engine.has_unfinished():
        said = said + engine.step()
        check_memory(engine)
        for seq in engine.sequences():
            MODEL.check_cache(engine, seq)
        poison_free_memory(engine)
    check_drained(engine)
    return said


def by_index(outputs: list[StepOutput], n: int, name: str = "a") -> list[list[int]]:
    """The answers of a request."""
    mine = [output for output in outputs if output.request_id == name]
    return [tokens(mine, index) for index in range(n)]


def alone(request: Request) -> list[list[int]]:
    """Its answers as separate sequences of stage 4, which shares nothing."""
    engine = engine_of(stage="stage4_continuous")
    return by_index(run(engine, [request])["a"], request.params.n)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("length", "held", "copies"),
    [(7, [2, 4, 7, 7, 7, 7, 10], 2), (8, [2, 5, 5, 5, 5, 8, 8], 0), (9, [3, 5, 5, 5, 8, 8, 8], 2),
     (1, [1, 3, 3, 3, 6], 2)],
)  # fmt: skip
def test_a_fork_takes_memory_at_the_first_write_only(length, held, copies, caching):
    """Blocks of 4, n = 3: those of the prompt, then a tail for each (the last one keeps the shared), and so on."""
    engine = engine_of(enable_prefix_caching=caching)
    request = samples(length, 3, max_tokens=len(held) + 1)
    engine.add_request(request)
    got, said, pool = [], [], engine.kv.blocks.pool
    for _ in held:
        said += engine.step()
        got.append(pool.num_blocks - pool.num_free)
    assert got == held
    assert engine.stats.cache.copies == copies
    assert engine.stats.tokens_computed == length + 3 * (len(held) - 1)
    assert by_index(finish(engine, said), 3) == alone(request)


def test_the_first_tokens_come_in_one_step_from_one_prompt():
    """All four draw from the same logits, whose prompt was computed by one forward of P tokens."""
    engine = engine_of()
    engine.add_request(samples(9, 4))
    said = engine.step()
    assert [output.index for output in said] == [0, 1, 2, 3]
    assert (engine.stats.forwards, engine.stats.tokens_computed) == (1, 9)
    assert [output.counters.tokens_computed for output in said] == [9, 0, 0, 0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 5}, {"max_num_seqs": 2}, {"max_num_seqs": 1},
     {"num_blocks": 6, "watermark": 0.0}, {"num_blocks": 9, "max_num_batched_tokens": 7, "max_num_seqs": 7},
     {"policy": "priority"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "sampling", [SAMPLED, {"seed": None}, {"temperature": 0.0}], ids=["seeded", "free", "greedy"]
)
def test_as_n_separate_sequences(options, caching, sampling):
    """Whatever budget, places and memory: the answers of stage 4, which computes each of the five by itself."""
    engine = engine_of(**options, enable_prefix_caching=caching)
    request = samples(10, 5, **sampling)
    engine.add_request(request)
    assert by_index(finish(engine, []), 5) == alone(request)


def test_fewer_places_than_answers():
    """Two places, five answers: two begin with the prompt, the others find it in the cache when they enter."""
    engine = engine_of(max_num_seqs=2)
    engine.add_request(samples(10, 5))
    said = finish(engine, [])
    last = {output.index: output.counters for output in said}
    assert [last[index].cached_tokens for index in range(5)] == [0, 0, 8, 8, 8]
    assert [last[index].tokens_computed for index in range(5)] == [10 + 7, 7, 2 + 7, 2 + 7, 2 + 7]


def test_a_pool_smaller_than_the_tails():
    """Six blocks: the prompt's three, and three tails to write; some lose their memory and find the prompt again."""
    engine = engine_of(6, watermark=0.0)
    request = samples(10, 5, max_tokens=12)
    engine.add_request(request)
    assert by_index(finish(engine, []), 5) == alone(request)
    assert engine.stats.preemptions > 0
    assert engine.stats.cache.hits == 0, "its own work, found again"


def test_a_prompt_in_chunks_is_forked_by_its_last_chunk():
    """P = 10 in chunks of 4: silence twice, then three first tokens; nobody waits in the running batch before."""
    engine = engine_of(max_num_batched_tokens=4, max_num_seqs=4)
    request = samples(10, 3)
    engine.add_request(request)
    assert [len(engine.step()) for _ in range(2)] == [0, 0]
    assert [seq.num_computed_tokens for seq in engine.sequences()] == [8, 0, 0]
    said = engine.step()
    assert [output.index for output in said] == [0, 1, 2]
    assert by_index(finish(engine, said), 3) == alone(request)
    assert engine.stats.tokens_computed == 10 + 3 * 7


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("gone", [{0}, {1}, {0, 1}, {1, 2}, {0, 2}])
@pytest.mark.parametrize("caching", [True, False])
def test_one_answer_is_taken_back(steps, gone, caching):
    """Answer 0, which computes the prompt, or others; before it is admitted, between chunks, and when all run."""
    engine = engine_of(max_num_batched_tokens=4, max_num_seqs=4, enable_prefix_caching=caching)
    request = samples(10, 3)
    engine.add_request(request)
    said = []
    for _ in range(steps):
        said += engine.step()
    for index in sorted(gone):
        [last] = engine.abort("a", index)
        assert (last.index, last.new_token_ids, last.finish_reason) == (index, (), FinishReason.ABORT)
        check_memory(engine)
    whole, got = alone(request), by_index(finish(engine, said), 3)
    for index in range(3):
        assert got[index] == whole[index][: max(0, steps - 2) if index in gone else None]
    assert (engine.scheduler.ranks, engine.scheduler.followers) == ({}, {})
    if caching and gone == {0}:  # its full blocks are found by the one that takes its place
        assert engine.stats.tokens_computed == 10 + 2 * 7 + max(0, steps - 3)


@pytest.mark.parametrize("steps", range(5))
def test_the_request_is_taken_back(steps):
    """While it waits, between its chunks, and when all three run: nothing is left, and the next one is served."""
    engine = engine_of(max_num_batched_tokens=4, max_num_seqs=4)
    engine.add_request(samples(10, 3))
    for _ in range(steps):
        engine.step()
    assert [output.index for output in engine.abort("a")] == [0, 1, 2]
    check_drained(engine)
    assert (engine.scheduler.ranks, engine.scheduler.followers) == ({}, {})
    engine.add_request(samples(10, 3))
    assert by_index(finish(engine, []), 3) == alone(samples(10, 3))


@pytest.mark.parametrize("caching", [True, False])
def test_the_leader_loses_its_memory_between_chunks(caching):
    """The others go on waiting for it, not for memory; the prompt is finished later, and all draw from it."""
    engine = engine_of(
        8, max_num_batched_tokens=8, max_num_seqs=4, watermark=0.0, enable_prefix_caching=caching
    )
    older, request = samples(5, 1, name="old", max_tokens=16), samples(18, 3, max_tokens=6)
    engine.add_request(older)
    said = engine.step()
    engine.add_request(request)
    said += engine.step()
    hostages = engine.kv.blocks.pool.allocate(engine.kv.blocks.pool.num_free)
    said += engine.step()
    engine.kv.blocks.pool.free(hostages)
    assert engine.stats.preemptions == 1
    assert [seq.index for seq in engine.sequences() if seq.request_id == "a"] == [0, 1, 2]
    said = finish(engine, said)
    assert by_index(said, 3) == alone(request)
    assert by_index(said, 1, "old") == by_index(run(engine_of(), [older])["old"], 1, "old")


def test_a_child_loses_its_memory():
    """The worst rank is the last answer: it comes back, finds full blocks, and its text goes on."""
    engine = engine_of(num_blocks=16, watermark=0.0)
    request = samples(8, 3, max_tokens=10)
    engine.add_request(request)
    said = engine.step()
    hostages = engine.kv.blocks.pool.allocate(engine.kv.blocks.pool.num_free - 2)
    said += engine.step()
    engine.kv.blocks.pool.free(hostages)
    assert [(seq.index, seq.counters.preemptions) for seq in engine.sequences()] == [(0, 0), (1, 0), (2, 1)]
    said = finish(engine, said)
    assert by_index(said, 3) == alone(request)
    last = {output.index: output.counters for output in said}
    assert [last[index].tokens_computed for index in range(3)] == [8 + 9, 9, 9], (
        "it computes the token that it lacked"
    )


@pytest.mark.parametrize("budget", [64, 4])
def test_log_probabilities_of_the_prompt(budget):
    """Each answer carries them, so each computes its prompt itself; the entries are those of stage 4."""
    request = samples(9, 3, prompt_logprobs=1, max_tokens=4)
    engine = engine_of(max_num_batched_tokens=budget, max_num_seqs=4)
    engine.add_request(request)
    said = finish(engine, [])
    assert by_index(said, 3) == alone(request)
    scored = [output.prompt_logprobs for output in said if output.prompt_logprobs]
    [cold] = {len(output.prompt_logprobs) for output in said if output.prompt_logprobs}
    assert (len(scored), cold) == (3, 9)
    other = [
        o.prompt_logprobs
        for o in run(engine_of(stage="stage4_continuous"), [request])["a"]
        if o.prompt_logprobs
    ]
    for mine in scored:
        for entry, expected in zip(mine[1:], other[0][1:], strict=True):
            assert {token: value.rank for token, value in entry.items()} == {
                token: value.rank for token, value in expected.items()
            }
            assert [value.logprob for value in entry.values()] == pytest.approx(
                [value.logprob for value in expected.values()]
            )


def test_priority_with_several_answers():
    """A better rank that comes later goes first, and takes blocks from answers of the worse one."""
    engine = engine_of(9, policy="priority", watermark=0.0, max_num_seqs=6)
    low, high = samples(8, 3, max_tokens=12), samples(7, 2, name="b", max_tokens=12)
    low, high = (
        Request(r.request_id, r.prompt_token_ids, r.params, priority=p) for r, p in ((low, 5), (high, 0))
    )
    engine.add_request(low)
    said = engine.step()
    engine.add_request(high)
    said = finish(engine, said)
    assert by_index(said, 3) == alone(low)
    assert by_index(said, 2, "b") == by_index(run(engine_of(stage="stage4_continuous"), [high])["b"], 2, "b")
    lost = {output.request_id: output.counters.preemptions for output in said}
    assert engine.stats.preemptions > 0
    assert lost["b"] == 0
