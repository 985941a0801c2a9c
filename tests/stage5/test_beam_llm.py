"""`LLM.beam_search`: text in, the best answers out; on the tiny models and on the real one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.beams import hf_beams
from transformers import AutoModelForCausalLM

from common import LLM, BeamSearchParams, SamplingParams
from common.bench.demo_prompts import PROMPTS
from common.errors import InvalidValue
from common.model.loader import resolve
from common.stages import STAGES

STAGE = "stage5_prefix_sharing"


@cache
def transformers_model(name: str):
    """The same files in transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()


def tiny(stage: str, max_model_len: int = 128) -> LLM:
    """An LLM over a tiny random model."""
    return LLM(
        stage=stage, model="tiny-llama", dtype="float32", max_model_len=max_model_len, kv_bytes=1 << 22,
        kernel="reference",
    )  # fmt: skip


def assert_equal(llm: LLM, name: str, outputs, params: BeamSearchParams) -> None:
    """Each output's answers are those of transformers for its prompt alone, in order of score."""
    for output in outputs:
        eos = llm.model.config.eos_token_ids
        [want] = hf_beams(transformers_model(name), [output.prompt_token_ids], params, eos)
        assert [answer.token_ids for answer in output.outputs] == [tokens for tokens, _ in want]
        scores = [params.score(a.cumulative_logprob, len(a.token_ids)) for a in output.outputs]
        assert scores == pytest.approx([score for _, score in want], rel=1e-4)
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("penalty", [1.0, -0.5])
def test_answers_of_a_tiny_model(penalty):
    """Every form of prompt, several at once; tokens, text, ends, sums of log probabilities."""
    llm = tiny(STAGE)
    params = BeamSearchParams(4, n=3, max_tokens=8, length_penalty=penalty)
    prompts = ["Hello", [5, 6, 7], [{"role": "user", "content": "Hi"}]]
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["Hello", None, None]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert_equal(llm, "tiny-llama", outputs, params)
    for answer in (answer for output in outputs for answer in output.outputs):
        ended = answer.token_ids[-1] in llm.model.config.eos_token_ids
        assert answer.finish_reason == ("stop" if ended else "length")
        assert answer.text == llm.tokenizer.decode(answer.token_ids[: -1 if ended else None])
        assert answer.cumulative_logprob == sum(
            entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
        )
    [single] = llm.beam_search("Hello", params, use_tqdm=False)
    assert single.outputs == outputs[0].outputs
    assert not llm.engine.has_unfinished()


def test_a_stop_id_in_the_text():
    """The ending token's text is kept only if that is asked for."""
    llm = tiny(STAGE)
    short = {"max_tokens": 6, "ignore_eos": True, "length_penalty": -9.0}
    [output] = llm.beam_search("Hello", BeamSearchParams(3, **short), use_tqdm=False)
    stop = output.outputs[0].token_ids[1]
    for keep in (False, True):
        params = BeamSearchParams(3, stop_token_ids=[stop], include_stop_str_in_output=keep, **short)
        [output] = llm.beam_search("Hello", params, use_tqdm=False)
        [answer] = output.outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert len(answer.token_ids) == 2
        assert answer.text == llm.tokenizer.decode(answer.token_ids[: None if keep else -1])


def test_bad_prompts_are_refused_before_any_runs():
    """One bad prompt, and nothing of the list is let in."""
    llm = tiny(STAGE, max_model_len=32)
    for bad, field in (([5] * 40, "prompt_token_ids"), ([10**6], "prompt_token_ids"), ("", "prompt")):
        with pytest.raises(InvalidValue) as error:
            llm.beam_search(["good", bad], BeamSearchParams(2), use_tqdm=False)
        assert error.value.field == field
        assert not llm.engine.has_unfinished()
    with pytest.raises(InvalidValue, match="beam_width"):
        llm.beam_search("good", BeamSearchParams(299), use_tqdm=False)


def test_a_stage_without_beam_search_says_so(stage):
    """By name, as capability, as method and as request; the engine is as it was."""
    llm = tiny(stage)
    can = STAGES[stage].number >= 5
    assert llm.engine.capabilities.beam_search is can
    if can:
        assert (
            len(llm.beam_search("Hi", BeamSearchParams(2, n=2, max_tokens=2), use_tqdm=False)[0].outputs) == 2
        )
        return
    params = BeamSearchParams(2)
    with pytest.raises(InvalidValue, match=f"stage: got '{stage}'"):
        llm.beam_search("Hi", params, use_tqdm=False)
    request = llm.request("Hi", params.sampling_params())
    with pytest.raises(InvalidValue, match="beam: got"):
        llm.engine.add_request(type(request)("a", request.prompt_token_ids, request.params, beam=params))
    assert not llm.engine.has_unfinished()
    assert llm.generate("Hi", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


@pytest.mark.slow
@pytest.mark.model135
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(4, n=4, max_tokens=8),
        BeamSearchParams(8, n=3, max_tokens=8, length_penalty=0.0, early_stopping=True),
        BeamSearchParams(3, n=3, max_tokens=8, length_penalty=-1.0, early_stopping="never"),
    ],
    ids=lambda params: f"width {params.beam_width}",
)
def test_real_model(params):
    """Three real prompts in one crowd, in float32; the short ones end by themselves, at several lengths."""
    llm = LLM(stage=STAGE, dtype="float32", max_model_len=256, kv_bytes=1 << 27, max_num_seqs=16)
    texts = [PROMPTS[1], "What is the capital of France? Answer in one word.", "Say yes or no."]
    outputs = llm.beam_search([[{"role": "user", "content": t}] for t in texts], params, use_tqdm=False)
    assert_equal(llm, "smollm2-135m", outputs, params)
    assert len({len(answer.token_ids) for output in outputs for answer in output.outputs}) > 2
