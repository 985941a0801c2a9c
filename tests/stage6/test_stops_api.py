"""Ends of answers over HTTP: stop strings, stop ids, minimum and maximum (6.5, and section 7)."""

from __future__ import annotations

import httpx
import pytest
from support.listening import listening

from common.generate import LLM
from stage6_api.served import Served, Settings
from stage6_api.server import Application

PATH = "/v1/completions"


def post(live, prompt, **more):
    answer = live.http.post(PATH, json=live.complete(prompt, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(live, prompt, **more):
    """Pieces of text, and the last choice."""
    chunks = live.stream(live.complete(prompt, **more), PATH)
    return [chunk["choices"][0]["text"] for chunk in chunks], chunks[-1]["choices"][0]


@pytest.mark.parametrize(("included", "text"), [(False, "AB C"), (True, "AB CDEF")])
def test_stop_string_cut_or_kept(live, included, text):
    """P2."""
    choice = post(live, live.lm.say("AB CDEF the"), stop="DEF", include_stop_str_in_output=included)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "DEF")


@pytest.mark.parametrize("stop", ["DE", "the wor", ["nothing", "B C"], "🙂", "o t"])
def test_nothing_of_a_stop_string_leaks(live, stop):
    """P3, section 7 rows 11, 13, 14: across tokens and half characters; no empty chunk before it."""
    script = "AB CDEF the Hello the world 🙂!"
    marker = live.lm.say(script)
    plain = post(live, marker, stop=stop, max_tokens=60)
    pieces, last = streamed(live, marker, stop=stop, max_tokens=60)
    first = min(script.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in script)
    assert "".join(pieces) == plain["text"] == script[:first]
    assert last["finish_reason"] == "stop"
    assert all(pieces[:-1])


def test_what_only_looks_like_a_stop_string_comes(live):
    """2.6: what was held back is sent when it turns out to be text, at the end too."""
    pieces, last = streamed(live, live.lm.say("AB CDX the w"), stop=["CDEF", "world"], max_tokens=60)
    assert "".join(pieces) == "AB CDX the w"
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] is None


def test_stop_string_at_the_last_token(live):
    """2.6: "stop", not "length"."""
    choice = post(live, live.lm.say("AB CD EF"), stop="CD", max_tokens=3)
    assert (choice["text"], choice["finish_reason"]) == ("AB ", "stop")


def test_min_tokens_with_stop(live):
    """P5: a stop string within the first five tokens is not seen; nor is the end."""
    marker = live.lm.say("eeeeeeee")
    choice = post(live, marker, stop="e", min_tokens=5, include_stop_str_in_output=True)
    assert choice["text"] == "e" * 6
    assert (
        post(live, live.lm.say("AB"), min_tokens=6, max_tokens=9, logprobs=0)["logprobs"]["tokens"][2:6] != []
    )


def test_ignore_eos(live):
    """P6: exactly max_tokens, and "length"."""
    choice = post(live, live.lm.say("AB"), ignore_eos=True, max_tokens=7, return_token_ids=True)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (7, "length")


def test_stop_token_ids(live):
    """P9: ends there and names the id; one outside the vocabulary is a 400 (section 7, row 26)."""
    [token] = live.lm.tokenizer.encode("CD")
    choice = post(live, live.lm.say("AB CD EF"), stop_token_ids=[token])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("AB ", "stop", token)
    answer = live.http.post(PATH, json=live.complete("x", stop_token_ids=[151645]))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop_token_ids"


def test_bad_words(live):
    """P11: absent, also behind a space."""
    text = post(live, live.lm.say("AB AB the"), bad_words=["AB"], max_tokens=8)["text"]
    assert "AB" not in text


def test_allowed_token_ids(live):
    """P12: only these; outside the vocabulary, and an empty list, are a 400."""
    [token] = live.lm.tokenizer.encode("Z")
    assert post(live, live.lm.say("AB CD"), allowed_token_ids=[token], max_tokens=4)["text"] == "ZZZZ"
    for bad in ([10**6], [], [-1], ["a"]):
        answer = live.http.post(PATH, json=live.complete("x", allowed_token_ids=bad))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_whole_characters_only(live):
    """Section 7, row 16: emoji and Cyrillic of several tokens; half of one at the end is one mark."""
    text = "Привет 👩‍👩‍👧 🙂 नमस्ते"
    marker = live.lm.say(text)
    pieces, _ = streamed(live, marker, max_tokens=100)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    for tokens in range(1, 40):
        pieces, _ = streamed(live, marker, max_tokens=tokens)
        assert "".join(pieces) == post(live, marker, max_tokens=tokens)["text"]
        assert "".join(pieces).rstrip("\ufffd") == text[: len("".join(pieces).rstrip("\ufffd"))]
        assert "".join(pieces).count("\ufffd") <= 1


def test_seed_does_not_see_its_neighbours(live):
    """P8: the same text alone and beside seven others."""
    alone = post(live, "seeded", temperature=1, seed=11, max_tokens=20)["text"]
    crowd = live.http.post(PATH, json=live.complete(["seeded"] + [f"other {i}" for i in range(7)], temperature=1,
                                                    seed=11, max_tokens=20)).json()  # fmt: skip
    assert crowd["choices"][0]["text"] == alone


def test_fifty_equal_prompts():
    """Section 7, row 41: at temperature 0 one answer, however many ask at the same time (a real forward)."""
    llm = LLM(model="tiny-llama", dtype="float32", kernel="reference", kv_bytes=4 << 20, max_model_len=256)
    served = Served(llm.engine, llm.tokenizer, llm.stage, Settings(served_model_names=("tiny",)))
    prompts = ["a cat sat on a mat", *(f"cat {i} sat" for i in range(10)), *["a cat sat on a mat"] * 49]
    with listening(Application(served.settings, served)) as base:
        body = {"prompt": prompts, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        choices = httpx.post(f"{base}{PATH}", json=body, timeout=60).json()["choices"]
    texts = [choice["text"] for choice in choices]
    assert {texts[0], *texts[11:]} == {texts[0]}
    assert len(set(texts)) > 5


@pytest.mark.parametrize("n", [1, 2])
def test_end_as_the_first_token(live, n):
    """KNOWN_FAULTS B115: an answer without text ends with a chunk of its own, plain and streamed."""
    marker = live.lm.say("")
    body = live.chat(marker, n=n)
    answer = live.http.post("/v1/chat/completions", json=body).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [""] * n
    assert answer["usage"]["completion_tokens"] == n
    chunks = live.stream(body)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * n + ["stop"] * n
    pieces, last = streamed(live, marker, n=n)
    assert (pieces, last["finish_reason"]) == ([""] * n, "stop")
    live.wait_idle()


def test_answers_that_end_at_different_steps(live):
    """KNOWN_FAULTS B31: each of n answers ends by itself, and none is lost."""
    body = live.complete("random", n=8, temperature=1, seed=2, stop=["A", "e", "5", "o"], max_tokens=40)
    plain = live.http.post(PATH, json=body).json()
    texts, reasons = [""] * 8, {}
    for chunk in live.stream(body, PATH):
        [choice] = chunk["choices"]
        assert choice["index"] not in reasons
        texts[choice["index"]] += choice["text"]
        reasons |= {choice["index"]: choice["finish_reason"]} if choice["finish_reason"] else {}
    assert texts == [choice["text"] for choice in plain["choices"]]
    assert [reasons[i] for i in range(8)] == [choice["finish_reason"] for choice in plain["choices"]]
    assert len({len(text) for text in texts}) > 2
