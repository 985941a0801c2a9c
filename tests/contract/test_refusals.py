"""What a stage says when its memory cannot take a request."""

from __future__ import annotations

import pytest
from support.engines import ask, build, run, tokens
from support.scripted import ScriptedModel

from common.errors import InvalidValue


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(stage):
    """B46: it must not sit at the head of the queue for ever; the next request runs."""
    engine = build(stage, ScriptedModel({9: (5, [20, 21, 22])}), kv_tokens=32, max_model_len=128)
    if not engine.capabilities.remembers_kv:
        pytest.skip("this stage keeps nothing that could run out")
    with pytest.raises(
        InvalidValue, match=r"kv_bytes: got \d+, allowed: at least \d+ .* (32 tokens|8 blocks) fit"
    ):
        engine.add_request(ask("big", [9] * 60, max_tokens=4))
    assert not engine.has_unfinished()
    assert tokens(run(engine, [ask("small", [9, 50, 51, 52, 53], max_tokens=3)])["small"]) == [20, 21, 22]


def test_room_for_one_request_only_still_serves_all(stage):
    """One after another, if it must be."""
    scripts = {m: (4, list(range(m + 10, m + 22))) for m in (3, 4, 5)}
    engine = build(stage, ScriptedModel(scripts), kv_tokens=16, max_num_seqs=4)
    said = run(engine, [ask(str(m), [m, 50, 51, 52], max_tokens=12) for m in scripts])
    assert {name: tokens(outputs) for name, outputs in said.items()} == {
        str(m): script for m, (_, script) in scripts.items()
    }
