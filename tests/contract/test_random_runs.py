"""Random runs of add, step and abort on every stage: all invariants after each operation, exact texts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import ask, build, tokens
from support.invariants import check_drained, check_memory, poison_free_memory
from support.scripted import EOS, ScriptedModel

from common.stages import find_stage

KV_TOKENS = 48
LENGTHS = {m: 1 + (m * 7) % 17 for m in range(3, 19)}
SCRIPTS = {m: (LENGTHS[m], [20 + (m * 5 + i) % 40 for i in range(m % 9 + 1)] + [EOS]) for m in LENGTHS}

operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(sorted(LENGTHS)), st.integers(1, 12), st.integers(1, 3)),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 7)),
    ),
    max_size=40,
)


def expected(marker: int, max_tokens: int, room: int) -> list[int]:
    """What the script says, cut by max_tokens and by the room that the request has alone."""
    return SCRIPTS[marker][1][: min(max_tokens, room - LENGTHS[marker])]


@settings(max_examples=60, deadline=None)
@given(
    operations=operations,
    block_size=st.sampled_from([1, 2, 4, 8]),
    seats=st.integers(1, 4),
    reservation=st.sampled_from(["max_tokens", "max_model_len"]),
    budget=st.sampled_from([1024, 4, 5, 9]),
)
def test_random_runs(stage, operations, block_size, seats, reservation, budget):
    """B04, B07, B08, B10 and every other way in which memory is lost or shared by mistake."""
    model = ScriptedModel(SCRIPTS)
    chunks = {"max_num_batched_tokens": budget} if find_stage(stage)[1].splits_prompts else {}
    engine = build(
        stage, model, kv_tokens=KV_TOKENS, max_model_len=32, block_size=block_size, max_num_seqs=seats,
        reservation=reservation, **chunks,
    )  # fmt: skip
    asked: dict[str, tuple[int, int, int]] = {}
    said: dict[str, list] = {}
    aborted: set[str] = set()

    def settle(outputs):
        for output in outputs:
            assert output.request_id not in aborted or not output.new_token_ids
            said.setdefault(output.request_id, []).append(output)
        check_memory(engine)
        poison_free_memory(engine)

    for operation in operations:
        match operation:
            case ("add", marker, max_tokens, n):
                name = str(len(asked))
                asked[name] = (marker, max_tokens, n)
                prompt = [marker] + [60] * (LENGTHS[marker] - 1)
                engine.add_request(ask(name, prompt, max_tokens=max_tokens, n=n))
                settle([])
            case ("step",):
                settle(engine.step())
            case ("abort", back):
                name = str(len(asked) - 1 - back)
                aborted |= {name} & engine.live.keys()
                settle(engine.abort(name))
    steps = 0
    while engine.has_unfinished():
        settle(engine.step())
        steps += 1
        assert steps < 40 * 3 * 13 * 4, "requests go round in circles"
    check_drained(engine)
    for name, (marker, max_tokens, n) in asked.items():
        for index in range(n):
            whole = expected(marker, max_tokens, 32)
            got = tokens(said[name], index)
            assert got == (whole[: len(got)] if name in aborted else whole)
