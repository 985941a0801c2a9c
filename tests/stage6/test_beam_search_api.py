"""`use_beam_search` over HTTP (OPENAI_API.md 3.6; rows A23, A38, P17, P18)."""

from __future__ import annotations

import pytest

from common.beam_params import BeamSearchParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_beams_of_many_prompts(live):
    """A23: n choices per prompt, best first; equal prompts, equal beams; then ordinary requests go on."""
    body = live.complete(["random", "random"], n=2, use_beam_search=True, max_tokens=6, logprobs=0)
    choices = live.http.post(TEXT, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in choices]
    assert texts[0] != texts[1]
    assert texts[:2] == texts[2:]
    assert live.http.post(TEXT, json=live.complete("x", max_tokens=1)).status_code == 200


@pytest.mark.parametrize("penalty", [None, 0.0, 2.0])
def test_beams_are_those_of_the_engine(live, penalty):
    """P18: sorted by score, which is the log probability over length to the penalty."""
    body = live.complete("random", n=3, use_beam_search=True, max_tokens=5, logprobs=0, return_token_ids=True)
    body |= {} if penalty is None else {"length_penalty": penalty}
    choices = live.http.post(TEXT, json=body).json()["choices"]
    params = BeamSearchParams(3, n=3, length_penalty=1.0 if penalty is None else penalty)
    scores = [
        params.score(sum(choice["logprobs"]["token_logprobs"]), len(choice["token_ids"]))
        for choice in choices
    ]
    assert scores == sorted(scores, reverse=True)
    greedy = live.http.post(TEXT, json=live.complete("random", max_tokens=5, logprobs=0)).json()["choices"][0]
    assert sum(choices[0]["logprobs"]["token_logprobs"]) >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-9


def test_end_of_sequence_ends_a_beam(live):
    """P17: unless it is ignored."""
    marker = live.lm.say("AB CD")
    for more, text, reason in (
        ({}, "AB CD", "stop"),
        ({"ignore_eos": True, "max_tokens": 5}, "AB CD", "length"),
    ):
        answer = live.http.post(CHAT, json=live.chat(marker, n=2, use_beam_search=True, **more)).json()
        best = answer["choices"][0]
        assert best["message"]["content"].startswith(text)
        assert best["finish_reason"] == reason


@pytest.mark.parametrize(("path", "more", "param"), [
    (TEXT, {"stream": True}, "stream"),
    (TEXT, {"echo": True, "logprobs": 1}, "echo"),  # A38
    (TEXT, {"logprobs": 2}, "logprobs"),
    (TEXT, {"stop": "x"}, "stop"),
    (TEXT, {"min_tokens": 2}, "min_tokens"),
    (TEXT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (TEXT, {"length_penalty": 100}, "length_penalty"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
])  # fmt: skip
def test_refused(live, path, more, param):
    """A38: what beams cannot honour is said, not dropped."""
    make = live.chat if path == CHAT else live.complete
    answer = live.http.post(path, json=make("random", n=2, use_beam_search=True, max_tokens=3, **more))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_stage_without_beams_says_so(with_settings):
    """A capability, not a guess."""
    with with_settings("stage4_continuous") as live:
        answer = live.http.post(TEXT, json=live.complete("x", n=2, use_beam_search=True))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "use_beam_search"
