"""Workloads of many turns: what each prompt repeats, who comes after whom, and that engines say the script."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import torch
from support.counting import CONFIG

from common.bench.conversations import AGENT_TURNS, USERS, agent_talks, chat_talks
from common.bench.record import Recorder
from common.bench.replay import Replay
from common.bench.scripted import CountingExecutor, ShapeOnly
from common.bench.workloads import TraceRequest, make_trace
from common.config import EngineConfig
from common.stages import find_stage


def test_real_conversations_are_all_there_once():
    """400 of them, 1,733 questions with their answers, 622,443 tokens: counted from the file by hand."""
    talks = chat_talks(400, seed=0)
    turns = [turn for talk in talks.conversations for turn in talk]
    assert (len(talks.conversations), len(turns), sum(map(sum, turns))) == (400, 1733, 622_443)
    text = files("common.bench.data").joinpath("sharegpt_conversations.jsonl").read_text()
    first = json.loads(text.splitlines()[0])
    assert [[first[i], first[i + 1]] for i in range(0, len(first), 2)] in [
        [list(turn) for turn in talk] for talk in talks.conversations
    ]


def test_a_prompt_is_all_that_was_said_and_what_is_new():
    trace = make_trace("chat", 60, vocab_size=500, max_model_len=4096)
    lengths = [turn for talk in chat_talks(60, 0).conversations for turn in talk]
    for item, (new, answer), before in zip(trace, lengths, [None, *trace], strict=False):
        assert item.output_len == answer == len(item.answer) + 1
        said = ()
        if before is not None and item.after is not None and trace[item.after] is before:
            said = before.prompt_token_ids + before.answer
        if len(said) + new == len(item.prompt_token_ids):
            assert item.prompt_token_ids[: len(said)] == said
        else:  # the first turn of a conversation, which waits for the one of its user before
            assert len(item.prompt_token_ids) == new


def test_sixteen_users_talk_at_once():
    trace = make_trace("agent", 4 * 40, vocab_size=500)
    assert [i for i, item in enumerate(trace) if item.after is None] == [
        AGENT_TURNS * k for k in range(USERS)
    ]
    for talk in range(40):
        start = AGENT_TURNS * talk
        assert [trace[start + i].after for i in range(1, AGENT_TURNS)] == [start, start + 1, start + 2]
        if talk >= USERS:
            assert trace[start].after == AGENT_TURNS * (talk - USERS + 1) - 1


def test_agents_have_one_system_prompt():
    trace = make_trace("agent", 24, vocab_size=49152)
    assert len({item.prompt_token_ids[:1000] for item in trace}) == 1
    assert len({item.prompt_token_ids[1000:1020] for item in trace}) == 6
    assert agent_talks(24, 0).system_len == 1000


@pytest.mark.parametrize("name", ["agent", "chat"])
def test_conversations_fit_the_context_and_can_be_cut(name):
    for item in make_trace(name, 80, vocab_size=500, max_model_len=300):
        assert 1 <= item.output_len <= item.max_tokens
        assert len(item.prompt_token_ids) + item.max_tokens <= 300
    cut = make_trace(name, 20, vocab_size=500, longest=8)
    assert max(item.output_len for item in cut) <= 8
    assert min(len(item.prompt_token_ids) for item in cut) <= 16


def test_a_prompt_at_the_end_of_the_context_ends_its_conversation():
    trace = make_trace("agent", 8, vocab_size=500, max_model_len=1010)
    assert [(len(item.prompt_token_ids), item.after) for item in trace] == [(1009, None), (1009, None)]


def test_engines_say_the_script_and_turns_come_in_order(stage):
    """Whatever the engine, each answer is its trace's, and a turn comes when the one before has ended."""
    trace = [
        TraceRequest((5, 6, 7), 3, 8, None, (10, 11)),
        TraceRequest((5, 6, 7, 10, 11, 8), 1, 8, 0, ()),
        TraceRequest((9,), 2, 8, None, (12,)),
        TraceRequest((5, 6, 7, 10, 11, 8, 9), 2, 8, 1, (13,)),
    ]
    replay = Replay(trace, CONFIG)
    assert [request.request_id for request in replay.first] == ["0", "2"]
    assert replay.tokens == 8
    config = EngineConfig(
        kv_bytes=64 * CONFIG.kv_bytes_per_token(torch.float32),
        max_model_len=32,
        block_size=4,
        kernel="reference",
    )
    engine = find_stage(stage)[1].resolve()(ShapeOnly(CONFIG, torch.float32), config)
    engine.executor = replay.script(CountingExecutor())
    run = Recorder(engine).run(replay.first, follow=replay.follow)
    assert run.token_ids == {("0", 0): [10, 11, 2], ("1", 0): [2], ("2", 0): [12, 2], ("3", 0): [13, 2]}
    ended = {key[0]: number for number, step in enumerate(run.steps) for key in step.finished}
    began = {}
    for number, step in enumerate(run.steps):
        for part in step.computed:
            began.setdefault(part.request_id, number)
    assert began["1"] > ended["0"]
    assert began["3"] > ended["1"]
    assert run.added["0"] == run.added["2"] == 0.0 < run.added["1"] < run.added["3"]
