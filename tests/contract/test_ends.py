"""How answers end, on every stage.  The scripted model says exact tokens through the stage's own cache."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run, tokens
from support.scripted import EOS, ScriptedModel, scripted_config

from common.protocol import FinishReason

SCRIPT = {
    10: (3, [20, 21, 22, EOS, 23, 24]),  # ends itself after three tokens
    11: (3, [EOS]),  # ends itself at once
    12: (3, [30, 31, 32, 33, 34, 35]),  # never ends itself
    13: (3, [7, 40, EOS, 41, 9, 42]),
}


def prompt(marker: int, length: int = 3) -> list[int]:
    """The marker and then filler."""
    return [marker, *range(50, 49 + length)]


def finish(outputs):
    """The last word on an answer: (finish reason, stop reason)."""
    assert all(output.finish_reason is None for output in outputs[:-1])
    return outputs[-1].finish_reason, outputs[-1].stop_reason


@pytest.mark.parametrize(
    ("marker", "params", "expected", "reason"),
    [
        (12, {"max_tokens": 4}, [30, 31, 32, 33], (FinishReason.LENGTH, None)),
        (10, {"max_tokens": 4}, [20, 21, 22, EOS], (FinishReason.STOP, None)),
        (13, {"max_tokens": 4}, [7, 40, EOS], (FinishReason.STOP, None)),
        (11, {}, [EOS], (FinishReason.STOP, None)),
        (12, {"max_tokens": 1}, [30], (FinishReason.LENGTH, None)),
        (12, {"stop_token_ids": [32]}, [30, 31, 32], (FinishReason.STOP, 32)),
        (10, {"ignore_eos": True, "max_tokens": 6}, [20, 21, 22, EOS, 23, 24], (FinishReason.LENGTH, None)),
        (10, {"ignore_eos": True, "stop_token_ids": [23]}, [20, 21, 22, EOS, 23], (FinishReason.STOP, 23)),
        (11, {"ignore_eos": True, "stop_token_ids": [EOS]}, [EOS], (FinishReason.STOP, EOS)),
    ],
)
def test_finish_reason(stage, marker, params, expected, reason):
    """B106, B101, B115: length, stop and stop id, also when the first token ends it."""
    said = run(build(stage, ScriptedModel(SCRIPT)), [ask("a", prompt(marker), **params)])["a"]
    assert tokens(said) == expected
    assert finish(said) == reason


def test_every_eos_id_of_the_model_ends_an_answer(stage):
    """B100: several end-of-sequence ids; 7 comes before 2."""
    model = ScriptedModel(SCRIPT, scripted_config(eos_token_ids=frozenset({EOS, 7})))
    said = run(build(stage, model), [ask("a", prompt(13))])["a"]
    assert tokens(said) == [7]
    assert finish(said) == (FinishReason.STOP, None)


def test_no_end_before_min_tokens(stage):
    """The sampler may not draw an ending token before `min_tokens`; the next likeliest comes instead."""
    said = run(build(stage, ScriptedModel(SCRIPT)), [ask("a", prompt(11), min_tokens=3, max_tokens=5)])["a"]
    assert EOS not in tokens(said)[:3]
    assert len(tokens(said)) >= 3


@pytest.mark.parametrize(("length", "room"), [(14, 2), (15, 1)])
def test_context_end_stops_with_length(stage, length, room):
    """B52: the answer ends where the context does."""
    model = ScriptedModel({12: (length, [30, 31, 32])}, scripted_config(max_position_embeddings=16))
    engine = build(stage, model, max_model_len=16)
    said = run(engine, [ask("a", prompt(12, length), max_tokens=10)])["a"]
    assert tokens(said) == [30, 31, 32][:room]
    assert finish(said) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("length", [16, 20])
def test_prompt_that_leaves_no_room_is_refused(stage, length):
    """B52, B46: refused by name and number; the next request is served."""
    engine = build(stage, ScriptedModel(SCRIPT), max_model_len=16)
    with pytest.raises(ValueError, match=rf"prompt_token_ids: got '{length} tokens', allowed: at most 15"):
        engine.add_request(ask("a", prompt(12, length)))
    assert not engine.has_unfinished()
    assert tokens(run(engine, [ask("b", prompt(12), max_tokens=2)])["b"]) == [30, 31]


def test_members_of_a_batch_end_one_by_one(stage):
    """Different lengths in one batch: everyone gets exactly their own script."""
    engine = build(stage, ScriptedModel(SCRIPT), max_num_seqs=3)
    requests = [ask(str(m), prompt(m), max_tokens=6) for m in (10, 12, 11, 13)]
    said = {name: tokens(outputs) for name, outputs in run(engine, requests).items()}
    assert said == {
        "10": [20, 21, 22, EOS],
        "12": [30, 31, 32, 33, 34, 35],
        "11": [EOS],
        "13": [7, 40, EOS],
    }
    assert engine.kv.usage().reserved == 0
    assert engine.live == {}


@pytest.mark.parametrize(
    ("stop_ids", "expected", "reason"),
    [
        ([], [40, 7, EOS, 41, 9, 42], (FinishReason.LENGTH, None)),
        ([9], [40, 7, EOS, 41, 9], (FinishReason.STOP, 9)),
    ],
)
def test_ignore_eos_means_every_eos_id_of_the_model(stage, stop_ids, expected, reason):
    """B101: EOS [2, 7], 7 at step 2, max_tokens 6: all six come; a user's stop id still stops."""
    config = scripted_config(eos_token_ids=frozenset({EOS, 7}))
    model = ScriptedModel({14: (3, [40, 7, EOS, 41, 9, 42])}, config)
    params = {"ignore_eos": True, "max_tokens": 6, "stop_token_ids": stop_ids}
    said = run(build(stage, model), [ask("a", prompt(14), **params)])["a"]
    assert tokens(said) == expected
    assert finish(said) == reason


def test_both_answers_of_a_request_end_with_their_first_token(stage):
    """B115: n = 2, EOS comes first: one token each, reason stop, nothing kept."""
    engine = build(stage, ScriptedModel(SCRIPT))
    said = run(engine, [ask("a", prompt(11), n=2)])["a"]
    assert [(o.index, o.new_token_ids, o.finish_reason) for o in sorted(said, key=lambda o: o.index)] == [
        (0, (EOS,), FinishReason.STOP),
        (1, (EOS,), FinishReason.STOP),
    ]
    assert not engine.has_unfinished()
    assert engine.kv.usage().reserved == 0
