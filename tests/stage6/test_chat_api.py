"""`/v1/chat/completions` without tools: rows B of OPENAI_API.md 6.2."""

from __future__ import annotations

import pytest

PATH = "/v1/chat/completions"


def post(live, text, **more):
    """The parsed answer to a chat request that must succeed."""
    answer = live.http.post(PATH, json=live.chat(text, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(live, text="x", **more):
    """The error object of a chat request that must fail with a 400."""
    answer = live.http.post(PATH, json=live.chat(text, **more))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def content(answer, index=0):
    return answer["choices"][index]["message"]["content"]


def test_plain_answer(live):
    """T1, 3.2: an answer without tools has no tool_calls at all."""
    answer = live.openai.chat.completions.create(**live.chat(live.lm.say("Hello AB")))
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "stop"
    raw = post(live, live.lm.say("Hello AB"))
    assert raw["choices"][0]["message"] == {"role": "assistant", "content": "Hello AB", "refusal": None}
    assert raw["system_fingerprint"].startswith("sixstage-")


@pytest.mark.parametrize(("top", "count"), [(0, 0), (None, 0), (5, 5)])
def test_logprobs(live, top, count):
    """B2, B3, B5: exactly as many alternatives; the token's own score always."""
    answer = post(live, live.lm.say("Hello 🙂"), logprobs=True, top_logprobs=top, max_tokens=4)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries][:3] == ["Hel", "lo", " "]
    assert [len(entry["top_logprobs"]) for entry in entries] == [count] * 4
    assert all(entry["logprob"] <= 0 for entry in entries)
    # D9: true bytes, also of a quarter of a smiley
    assert entries[3]["bytes"] == [0xF0]
    assert bytes(b for entry in entries[:3] for b in entry["bytes"]) == b"Hello "
    assert answer["choices"][0]["logprobs"]["refusal"] is None


def test_impossible_tokens_have_a_number(live):
    """2.1: minus infinity is -9999, as JSON has no infinity."""
    before = live.lm.confidence
    live.lm.confidence = 1e300  # so large that nothing is left for the others
    try:
        answer = post(live, live.lm.say("Hello"), logprobs=True, top_logprobs=2, max_tokens=1)
    finally:
        live.lm.confidence = before
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0, -9999.0]


def test_top_logprobs_need_logprobs(live):
    """B6: names the field; 0 asks for nothing."""
    assert refused(live, top_logprobs=5)["param"] == "top_logprobs"
    assert refused(live, top_logprobs=5, logprobs=False)["param"] == "top_logprobs"
    assert refused(live, top_logprobs=21, logprobs=True)["param"] == "top_logprobs"
    post(live, "x", top_logprobs=0, max_tokens=1)


def test_second_turn_finds_the_first_in_the_cache(live):
    """B8, section 7 row 34: whole blocks of prompt and answer of turn 1 are not computed again."""
    if not live.engine.capabilities.shares_prefixes:
        pytest.skip("this stage shares no prefixes")
    question = "A long question, of more than one block. " + live.lm.say("And an answer of some length.")
    first = post(live, question, max_tokens=50)
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": content(first)},
        {"role": "user", "content": "more" + live.lm.say("Yes.")},
    ]
    second = post(live, "", messages=turns)
    known = first["usage"]["total_tokens"]
    size = live.engine.config.block_size
    # The last token of an answer is never computed, as nothing comes after it.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= (known - 1) // size * size


def test_salt_separates_tenants(live):
    """1.5: another salt finds nothing; 8.3."""
    prompt = "The same long text for everyone, over and over. " * 3
    used = [
        post(live, prompt, max_tokens=1, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("tenant-a", "tenant-b", "tenant-a")
    ]
    assert used[:2] == [0, 0]
    assert (used[2] > 0) == live.engine.capabilities.shares_prefixes
    for bad in ("", "a@b", "a/b", "a\\b", "a\0b", "x" * 129, 5):
        assert refused(live, cache_salt=bad)["param"] == "cache_salt"


def test_extra_fields_are_let_through(live):
    """B20, 1.5, T19: in the body, in a message, and what SDK objects bring back."""
    messages = [
        {"role": "developer", "content": "be brief", "weight": 1},
        {"role": "assistant", "content": "hm", "refusal": None, "annotations": [], "audio": None,
         "reasoning_content": "let me think", "tool_calls": []},
        {"role": "user", "content": live.lm.say("Hello"), "name": "bob"},
    ]  # fmt: skip
    answer = post(live, "", messages=messages, some_extra={"a": 1}, user="u", store=True, verbosity="low",
                  metadata={"k": "v"}, service_tier="auto", prompt_cache_key="k")  # fmt: skip
    assert content(answer) == "Hello"


def test_content_as_parts(live):
    """B21: the same prompt as one text; a developer is the system (3.2)."""
    marker = live.lm.say("Hello")
    texts = [{"type": "text", "text": f"hi {marker}"}]
    whole, parts = (
        live.http.post("/tokenize", json={"messages": [{"role": role, "content": what}]}).json()["tokens"]
        for role, what in (("system", f"hi {marker}"), ("developer", texts))
    )
    assert whole == parts
    assert content(post(live, texts)) == "Hello"
    for part in (
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text"},
        {"type": "text", "text": None},
    ):
        assert refused(live, [part])["param"] == "messages"


@pytest.mark.parametrize("empty", ["", None])
def test_empty_assistant_turn(live, empty):
    """Section 7, row 29."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": empty},
        {"role": "user", "content": live.lm.say("Hello")},
    ]
    assert content(post(live, "", messages=messages)) == "Hello"


@pytest.mark.parametrize(
    "bad",
    [[], None, "hi", [5], [{"role": "user"}], [{"content": "x"}], [{"role": "", "content": "x"}]],
)
def test_malformed_messages(live, bad):
    """1.5: at least one message, each with a role and a content."""
    assert refused(live, "", messages=bad)["param"] == "messages"


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_seed_beyond_64_bits(live, seed):
    """B23: the message names the bound."""
    error = refused(live, seed=seed)
    assert error["param"] == "seed"
    assert "9223372036854775807" in error["message"] or "-9223372036854775808" in error["message"]


def test_n_answers(live):
    """B24, D8, P14: indexes in order, the prompt counted once; greedy ones are equal and allowed."""
    answer = post(live, "random", n=3, temperature=1, max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
    single = post(live, "random", max_tokens=8)
    assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * 8
    greedy = post(live, "random", n=2, temperature=0, max_tokens=8)
    assert content(greedy, 0) == content(greedy, 1) == content(single)


def test_n_with_seed_repeats(live):
    """B26: the same pair again; another seed, another pair."""
    pairs = [
        tuple(content(post(live, "random", n=2, seed=seed, temperature=1, max_tokens=10), i) for i in (0, 1))
        for seed in (7, 7, 8)
    ]
    assert pairs[0] == pairs[1] != pairs[2]
    assert pairs[0][0] != pairs[0][1]


def test_unseeded_answers_differ(live):
    """3.5: an omitted seed is random."""
    texts = {content(post(live, "random", temperature=1, max_tokens=10)) for _ in range(4)}
    assert len(texts) == 4
    assert len({content(post(live, "random", temperature=1, max_tokens=10, seed=-1)) for _ in range(4)}) == 4


@pytest.mark.parametrize("n", [0, -1, 129, 2**31, 1.5, "2", True])
def test_n_out_of_range(live, n):
    """B27: at once, and without making room for them."""
    assert refused(live, n=n)["param"] == "n"


def test_echo_and_continue(live):
    """B29, B30: the answer goes on from the assistant's beginning, which is sent too if asked for."""
    marker = live.lm.say("Hello the world")
    messages = [{"role": "user", "content": marker}, {"role": "assistant", "content": "Hello"}]
    more = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    for echo, text in ((True, "Hello the world"), (False, " the world")):
        answer = post(live, "", echo=echo, **more)
        assert content(answer) == text
        assert answer["choices"][0]["message"]["role"] == "assistant"
        chunks = live.stream(live.chat("", echo=echo, **more))
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert refused(live, messages=messages, continue_final_message=True, add_generation_prompt=True)


def test_logit_bias(live):
    """B33, B38, 3.5: +-100 forces and bans; values beyond are held there."""
    ids = live.lm.tokenizer.hf.convert_tokens_to_ids(["Hel", "Z"])
    assert content(post(live, live.lm.say("Hello"), logit_bias={str(ids[0]): -100}, max_tokens=2)) != "Hello"
    forced = content(post(live, live.lm.say("Hello"), logit_bias={str(ids[1]): 5000}, max_tokens=3))
    assert forced == "ZZZ"


@pytest.mark.parametrize(
    "bias",
    [{"not_a_token_id": 1}, {"5": "x"}, {"AI": -100}, {"191222": -100}, {"-1": 1}, {"1.5": 1}, []],
)
def test_bad_logit_bias(live, bias):
    """B35, B36, section 7 row 25: 400 naming key and field, and the engine lives."""
    error = refused(live, logit_bias=bias)
    assert error["param"] == "logit_bias"
    assert "logit_bias" in error["message"]
    if "not_a_token_id" in bias:
        assert "not_a_token_id" in error["message"]
    post(live, "still there?", max_tokens=1)


def test_limits_of_the_context(live):
    """B42, 1.5: an answer that would go beyond is cut there; one longer than the whole context is refused."""
    prompt = "x" * 2000
    tokens = post(live, prompt, max_tokens=1)["usage"]["prompt_tokens"]
    room = 2048 - tokens
    answer = post(live, prompt, max_tokens=room + 10, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == room
    assert answer["choices"][0]["finish_reason"] == "length"
    assert post(live, prompt, ignore_eos=True)["usage"]["completion_tokens"] == room
    error = refused(live, max_tokens=999999)  # section 7, row 19
    assert error["param"] == "max_tokens"
    assert "2048" in error["message"]


def test_newer_name_of_max_tokens_wins(live):
    """1.5."""
    marker = live.lm.say("A" * 30)
    assert post(live, marker, max_completion_tokens=3, max_tokens=7)["usage"]["completion_tokens"] == 3
    assert post(live, marker, max_tokens=7)["usage"]["completion_tokens"] == 7
    assert post(live, marker, max_completion_tokens=None)["usage"]["completion_tokens"] == 31
    assert refused(live, max_tokens=0)["param"] == "max_tokens"


def test_alias(live):
    """B50, 1.2: another name, or none, gets the first served one's answer."""
    for name in ("org/alias", "", None):
        assert post(live, "x", model=name, max_tokens=1)["model"] == "toy"
    body = live.chat("x", max_tokens=1)
    del body["model"]
    assert live.http.post(PATH, json=body).json()["model"] == "toy"


def test_request_templates_are_refused(live, with_settings):
    """1.5: unless the server trusts them."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    assert refused(live, chat_template=template)["code"] == "unsupported_parameter"
    with with_settings(trust_request_chat_template=True) as trusting:
        marker = trusting.lm.say("Hello")
        answer = post(trusting, marker, chat_template="{{ messages[0].content }}{{ extra }}",
                      chat_template_kwargs={"extra": ""})  # fmt: skip
        assert content(answer) == "Hello"
    for taken in ("messages", "tokenize", "add_generation_prompt"):
        assert refused(live, chat_template_kwargs={taken: 1})["param"] == "chat_template_kwargs"
    post(live, "x", chat_template_kwargs={"enable_thinking": False}, max_tokens=1)
