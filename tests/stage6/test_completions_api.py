"""`/v1/completions`: rows A of OPENAI_API.md 6.1, and the reports of section 7 that concern it."""

from __future__ import annotations

import pytest

PATH = "/v1/completions"


def post(live, prompt, **more):
    """The parsed answer to a completions request that must succeed."""
    answer = live.http.post(PATH, json=live.complete(prompt, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(live, prompt, **more):
    """The error object of a completions request that must fail with a 400."""
    answer = live.http.post(PATH, json=live.complete(prompt, **more))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def encode(live, text):
    return live.lm.tokenizer.encode(text)


def test_single_completion(live):
    """A1, A2: one choice, counts that add up, cached tokens always reported."""
    prompt = "Tell me " + live.lm.say("AB" * 9)
    answer = live.openai.completions.create(model="toy", prompt=prompt, max_tokens=5, temperature=0)
    [choice] = answer.choices
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "toy")
    assert (choice.text, choice.finish_reason, choice.index) == ("AB" * 5, "length", 0)
    usage = answer.usage
    assert usage.completion_tokens == 5
    assert usage.prompt_tokens == len(encode(live, prompt))
    assert usage.total_tokens == usage.prompt_tokens + 5
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_prompt_of_token_ids(live):
    """A4: ids in place of text; no prompt scores unless asked for."""
    ids = encode(live, "abc" + live.lm.say("Hello"))
    answer = post(live, ids, max_tokens=9)
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0].get("prompt_logprobs") is None
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(("side", "kept"), [("right", slice(4)), ("left", slice(4, 8)), (None, slice(4, 8))])
def test_truncated_prompt(live, side, kept):
    """A5: which end is kept; the tail, unless said otherwise."""
    ids = list(range(70, 78))
    answer = post(
        live, ids, truncate_prompt_tokens=4, truncation_side=side, return_token_ids=True, max_tokens=1
    )
    assert answer["choices"][0]["prompt_token_ids"] == ids[kept]
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("keep", [-2, 0, 5000])
def test_truncation_out_of_range(live, keep):
    """1.5: -1 is the whole context; 0 would leave nothing."""
    assert refused(live, "abc", truncate_prompt_tokens=keep)["param"] == "truncate_prompt_tokens"
    post(live, "abc" * 2000, truncate_prompt_tokens=-1, max_tokens=1)


@pytest.mark.parametrize(("asked", "entries"), [(0, {1}), (5, {5, 6})])
def test_logprobs(live, asked, entries):
    """A7, A8: the sampled token always, and as many of the likeliest as asked for."""
    answer = post(live, "a" + live.lm.say("Hello AB"), logprobs=asked, max_tokens=4)
    scores = answer["choices"][0]["logprobs"]
    assert {len(top) for top in scores["top_logprobs"]} <= entries
    assert scores["tokens"] == ["Hel", "lo", " ", "AB"]
    assert scores["text_offset"] == [0, 3, 5, 6]
    for token, logprob, top in zip(
        scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
    ):
        assert top[token] == logprob <= 0


@pytest.mark.parametrize("asked", [0, 1, None, -1])
def test_prompt_logprobs(live, asked):
    """A10: a list per choice, first entry null; -1 is beyond the operator's limit."""
    if asked == -1:
        assert refused(live, "ab", prompt_logprobs=-1)["param"] == "prompt_logprobs"
        return
    answer = post(live, ["abc", "de"], prompt_logprobs=asked, max_tokens=1)
    for choice, length in zip(answer["choices"], (3, 2), strict=True):
        rows = choice.get("prompt_logprobs")
        if asked is None:
            assert rows is None
            continue
        assert rows[0] is None
        assert len(rows) == length
        assert all(max(asked, 1) <= len(row) <= asked + 1 for row in rows[1:])
        assert {"logprob", "rank", "decoded_token"} == set(next(iter(rows[1].values())))


def test_stream_equals_plain(live):
    """A11, A14: same text; one finish reason, on the last chunk; no usage unless asked for."""
    prompt = live.lm.say("Hello AB the 🙂🙂 world, é!")
    plain = post(live, prompt, max_tokens=30)
    chunks = live.stream(live.complete(prompt, max_tokens=30), PATH)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] == plain["choices"][0]["finish_reason"] == "stop"
    assert all(chunk.get("usage") is None for chunk in chunks)
    assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


def test_parallel_stream(live):
    """A13: n answers interleaved; three different texts, none in more chunks than tokens."""
    body = live.complete("random", n=3, max_tokens=12, temperature=1, seed=3)
    chunks = live.stream(body, PATH)
    texts, reasons, counts = [""] * 3, [], [0] * 3
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        counts[choice["index"]] += 1
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert reasons == ["length"] * 3
    assert len(set(texts)) == 3
    assert max(counts) <= 12
    plain = live.http.post(PATH, json=body).json()
    assert texts == [choice["text"] for choice in plain["choices"]]


def test_usage_in_streams(live):
    """A16, A17, section 7 row 8: at the end, after everything else; or in every chunk as well."""
    body = live.complete(live.lm.say("Hello AB"), max_tokens=20)
    *chunks, last = live.stream({**body, "stream_options": {"include_usage": True}}, PATH)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 1
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["total_tokens"] == 6
    both = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = live.stream({**body, "stream_options": both}, PATH)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + c["usage"]["completion_tokens"]
        for c in [*chunks, last]
    )


@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}])
def test_stream_options_without_a_stream(live, options):
    """A19, A20; an empty object is no option (section 7, row 7)."""
    assert refused(live, "x", stream_options=options)["param"] == "stream_options"
    assert refused(live, "x", stream=False, stream_options=options)["param"] == "stream_options"
    post(live, "x", stream_options={}, max_tokens=1)
    assert all(
        "usage" not in chunk
        for chunk in live.stream(live.complete("x", max_tokens=2, stream_options={}), PATH)
    )


def test_many_prompts(live):
    """A22, 2.3: equal prompts, equal answers; the index is prompt * n + sample; each prompt counts once."""
    ids = encode(live, "ab" + live.lm.say("Hello"))
    answer = post(live, [ids, ids], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"Hello"}
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids)
    assert answer["usage"]["completion_tokens"] == 4 * 3
    texts = [live.lm.say(text) for text in ("AB", "the world", "")]
    answer = post(live, texts)
    assert [choice["text"] for choice in answer["choices"]] == ["AB", "the world", ""]
    chunks = live.stream(live.complete(texts), PATH)
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("count", [1, 0])
def test_echo_with_logprobs(live, as_ids, count):
    """A25: the prompt in front, its first entries null, one entry per token."""
    text = "a cat" + live.lm.say("Hello AB")
    ids = encode(live, text)
    answer = post(live, ids if as_ids else text, echo=True, logprobs=count, max_tokens=3)
    [choice] = answer["choices"]
    scores = choice["logprobs"]
    # What is echoed for ids is their text, which leaves special tokens out.
    assert choice["text"] == ("a cat" if as_ids else text) + "Hello "
    assert (
        len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["text_offset"]) == len(ids) + 3
    )
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert all(max(count, 1) <= len(top) <= count + 1 for top in scores["top_logprobs"][1:])
    assert scores["text_offset"][:3] == [0, 1, 2]


def test_echo_of_the_prompt_alone(live):
    """A26, section 7 row 31: max_tokens 0 scores the prompt; no token is counted."""
    for stream in (False, True):
        body = live.complete("a cat", echo=True, logprobs=1, max_tokens=0)
        answer = live.stream(body, PATH)[0] if stream else live.http.post(PATH, json=body).json()
        [choice] = answer["choices"]
        assert choice["text"] == "a cat"
        assert choice["logprobs"]["tokens"] == list("a cat")
        assert choice["finish_reason"] == "length"
        assert stream or answer["usage"]["completion_tokens"] == 0
    assert refused(live, "a cat", max_tokens=0)["param"] == "max_tokens"


def test_echo_keeps_tokens_apart(live):
    """Section 7, row 32: tokens are single strings, also after line ends."""
    answer = post(live, "\n\n\na", echo=True, logprobs=1, max_tokens=1)
    scores = answer["choices"][0]["logprobs"]
    assert scores["tokens"][:4] == ["\n", "\n", "\n", "a"]
    assert scores["text_offset"][:4] == [0, 1, 2, 3]


def test_text_offsets_do_not_depend_on_chunks(live):
    """A28: a stop string holds text back, offsets and scores stay aligned with the tokens."""
    body = live.complete(live.lm.say("AB CD 🙂 ABCX the"), stop=["CDE", "🙂🙂"], logprobs=2, max_tokens=30)
    plain = live.http.post(PATH, json=body).json()["choices"][0]["logprobs"]
    streamed = {name: [] for name in plain}
    for chunk in live.stream(body, PATH):
        for name, part in chunk["choices"][0]["logprobs"].items():
            streamed[name] += part
    assert streamed == plain
    # Four tokens make the smiley: the last of them moves the offset on by one character.
    assert plain["text_offset"] == [0, 2, 3, 5, 6, 6, 6, 6, 7, 8, 10, 11, 12, 16]


@pytest.mark.parametrize("prompt", [None, "", [], [""], ["a", ""], [[]], [[1], []]])
def test_empty_prompt(live, prompt):
    """A32: says that it must not be empty."""
    error = refused(live, prompt)
    assert "non-empty" in error["message"]
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    "prompt", [[-1], [[1, -1]], [10**6], [[5], [10**6]], [1.5], [True], 5, {"a": 1}, ["a", 5]]
)
def test_impossible_prompt(live, prompt):
    """A34: ids that are none."""
    error = refused(live, prompt)
    assert error["param"] in ("prompt", "prompt_token_ids")


def test_number_of_prompts(live):
    """A35: 1,024 are taken, one more is not."""
    assert refused(live, ["x"] * 1025)["param"] == "prompt"
    assert len(post(live, [[70]] * 1024, max_tokens=1)["choices"]) == 1024


@pytest.mark.parametrize("asked", [-2, -1, 21, "5", True, 1.5])
def test_logprobs_out_of_range(live, asked):
    """A37 and 1.5."""
    assert refused(live, "a", logprobs=asked)["param"] == "logprobs"


def test_suffix_and_best_of_are_refused(live):
    """A41, D13: not ignored; empty or 1 means nothing and is taken."""
    for field, value in (("suffix", "end"), ("best_of", 3)):
        error = refused(live, "a", **{field: value})
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    post(live, "a", suffix=None, best_of=1, max_tokens=1)


def test_explicit_nulls(live):
    """LangChain sends them on every call (1.5): null is the same as left out."""
    post(live, ["a"], logprobs=None, seed=None, stop=None, n=None, logit_bias=None, stream=None, max_tokens=None,
         temperature=None, response_format=None)  # fmt: skip


def test_default_length(live):
    """1.5: 16 tokens, also for null."""
    assert post(live, "a" + live.lm.say("A" * 60))["usage"]["completion_tokens"] == 16
    assert post(live, "a" + live.lm.say("A" * 60), max_tokens=None)["usage"]["completion_tokens"] == 16


def test_ids_agree_everywhere(live):
    """B54: token ids, logprobs, prompt logprobs and echo tell the same story."""
    text = "cat" + live.lm.say("Hello")
    answer = post(live, text, echo=True, logprobs=0, prompt_logprobs=0, return_token_ids=True,
                  return_tokens_as_token_ids=True, max_tokens=2)  # fmt: skip
    [choice] = answer["choices"]
    ids = encode(live, text)
    assert choice["prompt_token_ids"] == ids
    assert [f"token_id:{i}" for i in ids + choice["token_ids"]] == choice["logprobs"]["tokens"]
    assert [next(iter(row)) for row in choice["prompt_logprobs"][1:]] == [str(i) for i in ids[1:]]
    assert live.lm.tokenizer.decode(choice["token_ids"]) == "Hello"
