"""The default model on real text: every stage gives transformers' answers in float32."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from common import LLM, SamplingParams
from common.bench.demo_prompts import PROMPTS
from common.model.loader import resolve
from common.stages import find_stage

pytestmark = [pytest.mark.slow, pytest.mark.model135]

MAX_TOKENS = 14
NEAR_TIE = 1e-3  # float32 over 30 layers: a smaller gap could fall either way in either library


def questions() -> list[str]:
    """Sixteen real prompts."""
    assert len(PROMPTS) == 16
    return list(PROMPTS)


@cache
def by_transformers() -> list[list[int]]:
    """Greedy answers of transformers' own `generate`, one prompt at a time, from the same files."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415  # takes seconds

    folder = resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for text in questions():
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            out = model.generate(
                **ids,
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        for logits in out.logits:
            best, second = logits[0].topk(2).values.tolist()
            assert best - second > NEAR_TIE, f"choose another prompt, this one has a near tie: {text}"
        answers.append(out.sequences[0, ids["input_ids"].shape[1] :].tolist())
    return answers


def test_real_answers_equal_transformers(stage):
    """Token for token, through the chat template, in one crowd; of stage 1, which computes all of it anew, fewer."""
    asked = questions()[:4] if find_stage(stage)[1].number == 1 else questions()
    llm = LLM(stage=stage, dtype="float32", max_model_len=512, kv_bytes=1 << 28, max_num_seqs=6)
    conversations = [[{"role": "user", "content": text}] for text in asked]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.chat(conversations, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == by_transformers()[: len(asked)]
    assert "France" in asked[0]
    assert "Paris" in outputs[0].outputs[0].text
