"""`LLM`: prompts of every form, results in order, counters, and nothing left behind."""

from __future__ import annotations

import time

import pytest

from common import LLM, SamplingParams
from common.errors import InvalidValue

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def small(stage: str, **options) -> LLM:
    """An LLM over a tiny random model."""
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 256, "kv_bytes": 1 << 22, "kernel": "reference"}
    return LLM(stage=stage, model="tiny-llama", dtype="float32", **(sizes | options))


def test_every_form_of_prompt(stage):
    """Text, token ids and chat messages, one or many, mixed in one list."""
    llm = small(stage)
    ids = llm.tokenizer.encode("Hello")
    messages = [{"role": "user", "content": "Hi"}]
    [by_text], [by_ids], [by_chat] = (
        llm.generate(p, GREEDY, use_tqdm=False) for p in ("Hello", ids, messages)
    )
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_text.prompt == "Hello"
    assert by_ids.prompt_token_ids == ids
    mixed = llm.generate([messages, "Hello", ids], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in mixed] == [
        by_chat.outputs[0].token_ids,
        by_text.outputs[0].token_ids,
        by_text.outputs[0].token_ids,
    ]
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt_token_ids == by_chat.prompt_token_ids


def test_results_come_in_the_order_of_the_prompts(stage):
    """Also when the last one ends first."""
    llm = small(stage)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    got = llm.generate(["first", "second", "third"], params, use_tqdm=False)
    assert [o.prompt for o in got] == ["first", "second", "third"]
    assert [len(o.outputs[0].token_ids) for o in got] == [9, 1, 5]
    assert [o.outputs[0].finish_reason for o in got] == ["length"] * 3


def test_one_bad_prompt_and_nothing_of_the_list_runs(stage):
    """The error names the field; the engine is as it was."""
    llm = small(stage)
    for bad in ("", [], [5, 10**6], ["no", "ids"], [[1.5]], [{"role": "user"}]):
        with pytest.raises(InvalidValue) as error:
            llm.generate(["good", bad], GREEDY, use_tqdm=False)
        assert "\n" not in str(error.value)
        assert not llm.engine.has_unfinished()
    with pytest.raises(InvalidValue, match="params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert llm.engine.stats.forwards == 0
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_stop_string_ends_the_answer_in_the_engine_too(stage):
    """The text is cut, the reason is stop, and no further token is computed for it."""
    llm = small(stage)
    [free] = llm.generate(
        "Hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    before = llm.engine.stats.tokens_emitted
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
    [cut] = llm.generate("Hello", params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert llm.engine.stats.tokens_emitted - before == len(cut.outputs[0].token_ids)
    assert not llm.engine.has_unfinished()


def test_stream_grows_and_can_be_left(stage):
    """Joined deltas are the text; leaving early frees the memory."""
    llm = small(stage)
    [whole] = llm.generate("Hello", GREEDY, use_tqdm=False)
    pieces = [output.outputs[0].delta for output in llm.stream("Hello", GREEDY)]
    assert "".join(pieces) == whole.outputs[0].text
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.engine.kv.usage().reserved == 0


def test_n_answers_of_one_prompt(stage):
    """Each whole and in index order; a seed makes them the same in every run, and unlike each other."""
    llm = small(stage)
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    [one] = llm.generate("Hello", params, use_tqdm=False)
    [two] = llm.generate("Hello", params, use_tqdm=False)
    assert [o.index for o in one.outputs] == [0, 1, 2]
    assert [o.token_ids for o in one.outputs] == [o.token_ids for o in two.outputs]
    assert len({tuple(o.token_ids) for o in one.outputs}) == 3


def test_counters_of_a_request(stage):
    """How many forwards it took part in, how many of its tokens they computed, and how often it lost its memory."""
    llm = small(stage)
    [output] = llm.generate([list(range(5, 15))], GREEDY, use_tqdm=False)
    counters = output.counters
    assert (counters.prompt_tokens, counters.output_tokens) == (10, 6)
    assert (counters.cached_tokens, counters.preemptions) == (0, 0)
    assert counters.forwards == 6
    remembers = llm.engine.capabilities.remembers_kv
    assert counters.tokens_computed == (10 + 5 if remembers else sum(range(10, 16)))


def test_arrivals_over_time(stage):
    """Requests come while others run, or to an idle engine; the answers are those of all at once."""
    llm = small(stage)
    prompts = ["one", "two", "three", "four"]
    at_once = llm.generate(prompts, GREEDY, use_tqdm=False)
    start = time.perf_counter()
    spread = llm.generate(prompts, GREEDY, use_tqdm=False, arrivals=[0.0, 0.01, 0.02, 0.3])
    assert time.perf_counter() - start >= 0.3
    assert [o.outputs[0].token_ids for o in spread] == [o.outputs[0].token_ids for o in at_once]


def test_limits_are_checked_at_start(stage):
    """What cannot work is refused before the first prompt."""
    with pytest.raises(InvalidValue, match="max_model_len"):
        small(stage, max_model_len=10**6)
    with pytest.raises(InvalidValue, match="stage"):
        small("stage9_magic")
    with pytest.raises(InvalidValue, match="kv_bytes"):
        small(stage, kv_bytes=0)
