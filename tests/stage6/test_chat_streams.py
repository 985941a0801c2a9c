"""Streams of `/v1/chat/completions`: order, deltas, usage and log probabilities (OPENAI_API.md 2.2 and 6.2)."""

from __future__ import annotations

import pytest

from stage6_api.schemas_answers import ChatChunkChoice, ChatCompletionChunk, Delta
from stage6_api.sse import TEXT, TextFrames, data_frame

PATH = "/v1/chat/completions"


def test_stream_equals_plain(live):
    """B9, B51, T1, 2.2, section 7 rows 35 and 38: role first and once, one id, the reason at last, without text."""
    text = "Hello AB 🙂 the world"
    body = live.chat(live.lm.say(text))
    plain = live.http.post(PATH, json=body).json()
    first, *middle, last = live.stream(body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert (
        "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
        == plain["choices"][0]["message"]["content"]
        == text
    )
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    heads = {
        tuple(chunk[key] for key in ("id", "created", "model", "object")) for chunk in [first, *middle, last]
    }
    assert len(heads) == 1
    assert heads.pop()[3] == "chat.completion.chunk"


@pytest.mark.parametrize(
    "text", ["", "a", 'half a "quote', "two\nlines\\", "Grüezi 🙂\u2028", "\x00", TEXT, "\x7f</script>"]
)
def test_frames_of_text(text):
    """A frame that was made around a text is the frame of the chunk with that text, to the byte."""

    def chunk(content: str) -> ChatCompletionChunk:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": 'a "model"'}
        part = ChatChunkChoice(index=2, delta=Delta(content=content), logprobs=None, finish_reason=None)
        return ChatCompletionChunk(**head, choices=[part], usage=None)

    assert TextFrames(chunk(TEXT)).frame(text) == data_frame(chunk(text))


def test_the_clients_own_stream_helper(live):
    """5.2: it asserts on order, object and index."""
    with live.openai.chat.completions.stream(**live.chat(live.lm.say("Hello AB"), n=2)) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello AB", "Hello AB"]
    assert any(event.type == "content.done" for event in events)


def test_usage_grows_with_every_chunk(live):
    """B11: continuous usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = live.chat("x", min_tokens=10, max_tokens=10, temperature=1, seed=1, stream_options=options)
    *chunks, finish, last = live.stream(body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[1:] == sorted(set(counts[1:]))
    assert finish["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 10
    assert last["choices"] == []


def test_roles_come_first_and_in_order(live):
    """2.2: the Python client raises IndexError if index 1 is seen before 0."""
    chunks = live.stream(live.chat("random", n=3, temperature=1, max_tokens=4))
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in chunks[:3])
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[3:])
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 3


def test_token_ids_in_a_stream(live):
    """B53: the prompt's on the first chunk only; joined ids are the answer, emoji included."""
    marker = live.lm.say("🙂 AB 🙂")
    first, *chunks = live.stream(live.chat(marker, return_token_ids=True))
    prompt = live.http.post("/tokenize", json={"messages": [{"role": "user", "content": marker}]}).json()
    assert first["prompt_token_ids"] == prompt["tokens"]
    assert all(chunk.get("prompt_token_ids") is None for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert live.lm.tokenizer.decode(ids) == "🙂 AB 🙂"
    assert ids[-1] == live.lm.end
    plain = live.http.post(PATH, json=live.chat(marker, return_token_ids=True)).json()
    assert plain["choices"][0]["token_ids"] == ids
    assert plain["prompt_token_ids"] == prompt["tokens"]


def test_logprobs_in_a_stream(live):
    """2.5, section 7 row 23: aligned with their tokens, whatever was held back."""
    body = live.chat(live.lm.say("AB 🙂 CD the"), logprobs=True, top_logprobs=3, stop=["CDX"])
    plain = live.http.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in live.stream(body)]
    assert [entry for part in parts if part for entry in part["content"]] == plain


def test_long_prompt_in_chunks(with_settings):
    """B45: a prompt of many forwards sends nothing before its first token; as many scores as tokens."""
    with with_settings(
        engine={"max_num_batched_tokens": 64, "kv_tokens": 16384, "max_model_len": 4096}
    ) as live:
        body = live.complete("x" * 2800 + live.lm.say("AB CD 🙂"), logprobs=5, max_tokens=20)
        body["stream_options"] = {"include_usage": True}
        *chunks, last = live.stream(body, "/v1/completions")
        assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert len(tokens) == last["usage"]["completion_tokens"] == 9
        assert len(live.lm.forwards) >= 2800 / 64
