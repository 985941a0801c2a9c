"""The table of OPENAI_API.md 1.5: each parameter just inside and just outside its range (row P15)."""

from __future__ import annotations

import json
import threading

import pytest
from support.waiting import wait_for

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
INT64 = 2**63

# parameter -> (values that are taken, values that are not)
RANGES = {
    "temperature": ([0, 0.005, 1.5, 2], [-0.01, 2.01, "1", True, [], float("nan"), float("inf")]),
    "top_p": ([0.0001, 1], [0, -0.1, 1.01, "1", float("nan")]),
    "top_k": ([-1, 0, 1, 5.0, 10**9], [-2, 1.5, "5", True]),
    "min_p": ([0, 1], [-0.01, 1.01, "0"]),
    "presence_penalty": ([-2, 0, 2], [-2.01, 2.01, "0", True]),
    "frequency_penalty": ([-2, 0, 2], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 1, 100], [0, -1, float("inf"), "1"]),
    "seed": ([-INT64, -1, 0, INT64 - 1], [-INT64 - 1, INT64, 1.5, "1", True]),
    "n": ([1, 2], [0, -1, 129, 2**31, 1.5, "1", True]),
    "stop": (["x", ["a", "b", "c", "d"], []], ["", [""], ["a"] * 5, 5, [5]]),
    "stop_token_ids": ([[], [0, 300]], [[-1], [10**6], ["a"], 5, [1.5]]),
    "include_stop_str_in_output": ([True, False], ["true", 1]),
    "ignore_eos": ([True, False], ["yes", 0]),
    "min_tokens": ([0, 2], [-1, 3, 1.5, "1"]),  # max_tokens is 2
    "logit_bias": ([{}, {"5": -100}, {"5": 100.5}], [{"x": 1}, {"5": "1"}, {"5": None}, [], 5]),
    "allowed_token_ids": ([[5, 6]], [[], [-1], [10**6], "5"]),
    "bad_words": ([[], ["a"], ["a"] * 128], [[""], ["a"] * 129, "a", [5]]),
    "prompt_logprobs": ([0, 20], [-2, -1, 21, "1", True]),
    "truncate_prompt_tokens": ([-1, 1, 2048], [-2, 0, 2049, 1.5]),
    "truncation_side": (["left", "right"], ["middle", 5]),
    "priority": ([0], [1.5, "high", INT64]),
    "request_id": (["abc-1", "x" * 128], ["x" * 129, 5]),
    "cache_salt": (["x", "y" * 128], ["", "z" * 129, "a@b", "a/b", 5]),
    "stream": ([False], ["false", 1]),
    "stream_options": ([{}], [5, [], {"include_usage": "yes"}]),
    "echo": ([True, False], ["yes", 1]),
    "return_token_ids": ([True, False], ["yes"]),
    "return_tokens_as_token_ids": ([True, False], ["yes"]),
    "use_beam_search": ([False], ["yes", 1]),
    "length_penalty": ([1.0], ["1", float("nan"), 2.0]),  # another value needs use_beam_search
    "skip_special_tokens": ([True, False], ["yes"]),
    "response_format": ([{"type": "text"}], [5, "json_object", []]),
    "structured_outputs": ([], [5, "x", []]),
    "user": (["u"], []),
    "metadata": ([{"a": "b"}], []),
    "service_tier": (["auto"], []),
}
ONLY = {
    "chat": {
        "max_tokens": ([1, 2048], [0, -1, 2049, 999999, 1.5, "5", True]),
        "max_completion_tokens": ([1, 2048], [0, -1, 2049, "5"]),
        "logprobs": ([True, False], [5, "true"]),
        "top_logprobs": ([0], [-1, 5, 21, "1"]),  # above 0 needs logprobs
        "add_generation_prompt": ([True, False], ["no"]),
        "continue_final_message": ([False], ["no", 0]),
        "modalities": ([["text"]], [["text", "audio"], ["audio"]]),
        "parallel_tool_calls": ([True, False], ["no"]),
        "chat_template_kwargs": ([{}, {"x": 1}], [5, []]),
    },
    "completions": {
        "max_tokens": ([1, 2048], [0, -1, 2049, 999999, 1.5, "5", True]),
        "logprobs": ([0, 20], [-2, -1, 21, "1", True, 1.5]),
        "add_special_tokens": ([True, False], ["no"]),
        "suffix": ([""], ["the end"]),
        "best_of": ([1], [2]),
    },
}
CASES = [
    pytest.param(path, field, value, taken, id=f"{path}-{field}-{value!r:.20}")
    for path in PATHS
    for field, (inside, outside) in (RANGES | ONLY[path]).items()
    for values, taken in (([*inside, None], True), (outside, False))
    for value in values
]


def body(live, path, **more):
    make = live.chat if path == "chat" else live.complete
    return make("ab", **{"max_tokens": 2, **more})


@pytest.mark.parametrize(("path", "field", "value", "taken"), CASES)
def test_range(live, path, field, value, taken):
    """P15: 200 inside, and for null; outside a 400 whose `param` is the field."""
    # httpx refuses to write NaN, and clients in other languages do not
    text = json.dumps(body(live, path, **{field: value}))
    answer = live.http.post(PATHS[path], content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == (200 if taken else 400), answer.text
    if not taken:
        error = answer.json()["error"]
        assert error["param"] == field, error
        assert field in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", PATHS)
def test_prompt_logprobs_in_a_stream(live, path):
    """1.5: above 0 they are not streamed."""
    refused = live.http.post(PATHS[path], json=body(live, path, stream=True, prompt_logprobs=1))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("chat", "functions", [{"name": "f"}]),
        ("chat", "function_call", "auto"),
        ("chat", "web_search_options", {}),
        ("chat", "audio", {"voice": "x"}),
        ("chat", "best_of", 2),
        ("chat", "priority", 5),
        ("completions", "priority", 5),
        ("completions", "prompt_embeds", "x"),
        ("completions", "logits_processors", ["x"]),
    ],
)
def test_what_is_not_served_is_named(live, path, field, value):
    """1.5: where ignoring would change the meaning, a 400 says so."""
    answer = live.http.post(PATHS[path], json=body(live, path, **{field: value}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == {"audio": "modalities"}.get(field, field)


def test_unlimited_logprobs(with_settings):
    """A10, 1.5: -1 is the whole vocabulary, where the operator allows it."""
    with with_settings(max_logprobs=-1) as live:
        answer = live.http.post(
            PATHS["completions"], json=body(live, "completions", logprobs=-1, max_tokens=1)
        )
        [top] = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
        assert len(top) == live.served.vocab_size
        answer = live.http.post(PATHS["chat"], json=body(live, "chat", logprobs=True, top_logprobs=30))
        assert len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 30


def test_priority(with_settings):
    """1.5, 3.5: the smaller number goes first; the gateway's header overrides the body."""
    with with_settings(engine={"policy": "priority", "max_num_seqs": 1}) as live:
        live.lm.gate.clear()
        first = live.served.engine
        done = []

        def ask(name, headers=None, **more):
            answer = live.http.post(
                PATHS["completions"], json=body(live, "completions", **more), headers=headers
            )
            assert answer.status_code == 200, answer.text
            done.append(name)

        threads = []
        for name, headers, more in (
            ("running", None, {}),
            ("late", None, {"priority": 9}),
            ("by header", {"X-Vllm-Priority": "-5"}, {"priority": 99}),
            ("middle", None, {"priority": 3}),
        ):
            threads.append(threading.Thread(target=ask, args=(name, headers), kwargs=more))
            threads[-1].start()
            wait_for(lambda: first.num_live_jobs == len(threads))
        live.lm.gate.set()
        for thread in threads:
            thread.join(10)
        # "running" was being computed when the others came; with one place at a time, it may be preempted.
        assert [name for name in done if name != "running"] == ["by header", "middle", "late"]
        for header in ("x", "1.5", str(2**63), ""):
            answer = live.http.post(
                PATHS["chat"], json=body(live, "chat"), headers={"X-Vllm-Priority": header}
            )
            assert answer.status_code == 400
