"""Adding, refusing and aborting, on every stage."""

from __future__ import annotations

import math

import pytest
from support.engines import answers, ask, build, run, tokens
from support.scripted import VOCAB, ScriptedModel

from common.errors import InvalidValue
from common.protocol import FinishReason, Request
from common.sampling_params import SamplingParams
from common.stages import find_stage

SCRIPT = {m: (4, list(range(m + 10, m + 20))) for m in (3, 4, 5, 6)}


def prompt(marker: int) -> list[int]:
    """Four tokens, the first of them the marker."""
    return [marker, 50, 51, 52]


def idle(engine) -> bool:
    """Nothing running, waiting, reserved or remembered."""
    usage = engine.kv.usage()
    return not engine.has_unfinished() and not engine.live and (usage.reserved, usage.used) == (0, 0)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ((), "prompt_token_ids"),
        ((3, VOCAB), "prompt_token_ids"),
        ((3, -1), "prompt_token_ids"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_is_lost(stage, bad, field):
    """The error names the field; the request before and the one after are served."""
    engine = build(stage, ScriptedModel(SCRIPT))
    engine.add_request(ask("before", prompt(3)))
    with pytest.raises(InvalidValue) as error:
        engine.add_request(ask("bad", bad))
    assert error.value.field == field
    assert "\n" not in str(error.value)
    got = answers(engine, [ask("after", prompt(4))])
    assert got == {"before": SCRIPT[3][1][:8], "after": SCRIPT[4][1][:8]}
    assert idle(engine)


@pytest.mark.parametrize(
    "params", [{"stop_token_ids": [VOCAB]}, {"allowed_token_ids": [VOCAB]}, {"logit_bias": {VOCAB: 1.0}}]
)
def test_ids_outside_the_vocabulary_are_refused(stage, params):
    """They would index past the logits."""
    engine = build(stage, ScriptedModel(SCRIPT))
    with pytest.raises(InvalidValue) as error:
        engine.add_request(ask("bad", prompt(3), **params))
    assert error.value.field == next(iter(params))
    assert idle(engine)


def test_two_live_requests_cannot_share_an_id(stage):
    """B113: the second is refused, the first goes on, and a finished id can be used again."""
    engine = build(stage, ScriptedModel(SCRIPT))
    engine.add_request(ask("x", prompt(3)))
    first = [engine.step() for _ in range(3)]
    with pytest.raises(InvalidValue, match="request_id"):
        engine.add_request(ask("x", prompt(4)))
    rest = run(engine, [])["x"]
    assert tokens([output for step in first for output in step] + rest) == SCRIPT[3][1][:8]
    assert answers(engine, [ask("x", prompt(4))]) == {"x": SCRIPT[4][1][:8]}


def test_an_aborted_id_can_be_used_at_once(stage):
    """B113: adding again right after an abort."""
    engine = build(stage, ScriptedModel(SCRIPT))
    engine.add_request(ask("x", prompt(3)))
    engine.step()
    engine.abort("x")
    assert answers(engine, [ask("x", prompt(4))]) == {"x": SCRIPT[4][1][:8]}
    assert idle(engine)


@pytest.mark.parametrize("after", range(10))
def test_abort_at_every_point(stage, after):
    """B10, B106, B116: after any step, no token of it comes, others are undisturbed, memory is free."""
    engine = build(stage, ScriptedModel(SCRIPT), max_num_seqs=2)
    for marker in (3, 4, 5):
        engine.add_request(ask(str(marker), prompt(marker)))
    said = [output for _ in range(after) for output in engine.step()]
    was_live = "4" in engine.live
    last_words = engine.abort("4")
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in last_words] == (
        [("4", (), FinishReason.ABORT)] if was_live else []
    )
    assert engine.abort("4") == []
    assert engine.abort("never seen") == []
    later = run(engine, [])
    assert "4" not in later
    for name, marker in (("3", 3), ("5", 5)):
        whole = [o for o in said if o.request_id == name] + later.get(name, [])
        assert tokens(whole) == SCRIPT[marker][1][:8]
    assert idle(engine)


def test_abort_of_everything_leaves_an_idle_engine(stage):
    """Running and waiting alike."""
    engine = build(stage, ScriptedModel(SCRIPT), max_num_seqs=2)
    for marker in SCRIPT:
        engine.add_request(ask(str(marker), prompt(marker)))
    engine.step()
    for marker in SCRIPT:
        engine.abort(str(marker))
    assert idle(engine)
    assert engine.step() == []


def test_n_answers(stage):
    """Asked for n = 3, three whole answers come with their own index; one of them can be aborted alone."""
    engine = build(stage, ScriptedModel(SCRIPT))
    said = run(engine, [ask("a", prompt(3), n=3, max_tokens=5)])["a"]
    assert [tokens(said, index) for index in range(3)] == [SCRIPT[3][1][:5]] * 3

    engine.add_request(ask("b", prompt(4), n=3, max_tokens=5))
    engine.step()
    [last] = engine.abort("b", 1)
    assert (last.index, last.finish_reason) == (1, FinishReason.ABORT)
    later = run(engine, [])["b"]
    assert {output.index for output in later} <= {0, 2}
    engine.add_request(ask("c", prompt(4), n=3))
    assert len(engine.abort("c")) == 3
    assert idle(engine)


def test_stopping_the_engine_config_from_lying(stage):
    """B53: a stage that cannot split prompts refuses a budget below the context, at start."""
    if find_stage(stage)[1].number >= 4:
        pytest.skip("this stage splits prompts")
    with pytest.raises(InvalidValue, match="max_num_batched_tokens"):
        build(stage, ScriptedModel(SCRIPT), max_model_len=64, max_num_batched_tokens=16)


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0])
def test_parameters_are_checked_before_an_engine_sees_them(temperature):
    """A request with such parameters cannot exist."""
    with pytest.raises(InvalidValue, match="temperature"):
        Request("a", (1,), SamplingParams(temperature=temperature))


def test_counters_tell_what_happened(stage):
    """Counted by hand: two answers of 5 and 3 tokens to prompts of 4."""
    engine = build(stage, ScriptedModel(SCRIPT), max_num_seqs=2)
    run(engine, [ask("a", prompt(3), max_tokens=5), ask("b", prompt(4), max_tokens=3)])
    stats = engine.stats
    assert (stats.requests_added, stats.sequences_finished, stats.sequences_aborted) == (2, 2, 0)
    assert (stats.prompt_tokens, stats.tokens_emitted) == (8, 8)
    if engine.capabilities.remembers_kv:
        assert stats.forwards == 5
        assert stats.tokens_computed == 8 + 4 + 2  # prompts, then all answer tokens but the last of each
        assert (stats.slot_steps, stats.idle_slot_steps) == (10, 2)
    else:
        assert stats.forwards == 8
        assert stats.tokens_computed == (4 + 5 + 6 + 7 + 8) + (4 + 5 + 6)


def test_last_batch_is_what_the_last_forward_computed(stage):
    """Watchers read it after the step, also when the step has ended someone."""
    engine = build(stage, ScriptedModel(SCRIPT), max_num_seqs=2)
    assert list(engine.last_batch) == []
    for marker, max_tokens in ((3, 1), (4, 2)):
        engine.add_request(ask(str(marker), prompt(marker), max_tokens=max_tokens))
    while engine.has_unfinished():
        outputs = engine.step()
        seen = [(seq.request_id, num_new) for seq, num_new in engine.last_batch]
        assert [name for name, _ in seen] == [output.request_id for output in outputs]
        assert [num_new for _, num_new in seen] == engine.model.forwards[-1]
