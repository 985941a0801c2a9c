"""Every stage's logits, token by token, against transformers: closer than equal texts can show."""

from __future__ import annotations

import pytest
import torch
from support.engines import ask, build, run, tokens
from support.hf_oracle import hf_logits, make_pair, relative_error
from support.watching import Listening


def crowd_logits(stage: str, model, requests: list, **options) -> dict[str, tuple[list[int], torch.Tensor]]:
    """By request: its tokens, and the logits `[n, V]` that each of them was drawn from, in one batch."""
    listening = Listening(model)
    engine = build(stage, listening, **options)
    drawn: dict[str, list[torch.Tensor]] = {}
    said: dict[str, list[int]] = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        outputs = engine.step()
        for output, row in zip(outputs, listening.heard[-1], strict=True):
            drawn.setdefault(output.request_id, []).append(row)
            said.setdefault(output.request_id, []).extend(output.new_token_ids)
    return {name: (said[name], torch.stack(rows)) for name, rows in drawn.items()}


def check(hf, prompt: list[int], answer: list[int], logits: torch.Tensor) -> None:
    """Each row is what transformers computes at that position of the whole text."""
    theirs = hf_logits(hf, prompt + answer)[len(prompt) - 1 : -1]
    assert logits.shape == theirs.shape
    assert relative_error(logits, theirs) < 1e-9


@pytest.mark.parametrize("variant", ["llama", "llama-yarn", "mistral-window", "qwen2", "qwen3"])
def test_two_sequences_side_by_side(stage, variant):
    """B56, B70: prompts of 2, 3 and 5 tokens, then decodes: positions and Q/K norms in the cached path too."""
    hf, model = make_pair(variant)
    prompts = {"two": [11, 40], "three": [7, 80, 3], "five": [90, 4, 4, 61, 23]}
    requests = [ask(name, prompt, max_tokens=4, ignore_eos=True) for name, prompt in prompts.items()]
    got = crowd_logits(stage, model, requests)
    for name, prompt in prompts.items():
        check(hf, prompt, *got[name])


@pytest.mark.parametrize("variant", ["mistral-window", "qwen3-layer-types"])
@pytest.mark.parametrize(("window", "length"), [(8, 6), (8, 12), (4, 12)])
def test_past_a_sliding_window(stage, variant, window, length):
    """B64, B65: over the window in the prompt or while decoding, blocks of 2; global layers see every key."""
    hf, model = make_pair(variant, sliding_window=window)
    prompt = [(5 * i + 3 * i * i + 7) % 97 for i in range(length)]
    got = crowd_logits(stage, model, [ask("a", prompt, max_tokens=6, ignore_eos=True)], block_size=2)
    check(hf, prompt, *got["a"])


def test_the_window_matters():
    """The test above can fail: without its window the model says something else."""
    prompt = [(5 * i + 3 * i * i + 7) % 97 for i in range(12)]
    narrow, _ = make_pair("qwen3-layer-types", sliding_window=4)
    wide, _ = make_pair("qwen3-layer-types", sliding_window=64)
    assert relative_error(hf_logits(narrow, prompt)[-1], hf_logits(wide, prompt)[-1]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_and_in_a_batch_of_eight(stage, dtype, record_property):
    """B68: float32 logits within 1e-4 and equal tokens; bfloat16 flips only where the two best are close.

    The engine's tokens decide what comes next, so bfloat16 rows are compared up to the first flip.
    """
    _, model = make_pair("llama", dtype)
    prompts = [[(7 * n + 13 * i * i + 5 * i) % 97 for i in range(n)] for n in (9, 3, 1, 17, 5, 2, 30, 11)]
    requests = [ask(str(i), prompt, max_tokens=5, ignore_eos=True) for i, prompt in enumerate(prompts)]
    together = crowd_logits(stage, model, requests, max_num_seqs=8)
    for request in requests:
        alone, rows = crowd_logits(stage, model, [request])[request.request_id]
        crowd, crowd_rows = together[request.request_id]
        same = next((i for i, pair in enumerate(zip(alone, crowd, strict=True)) if len({*pair}) > 1), None)
        difference = (rows - crowd_rows)[: None if same is None else same + 1].abs().max().item()
        record_property("largest difference", difference)
        if dtype == torch.float32:
            assert same is None
            assert difference < 1e-4
            continue
        assert difference < 0.25, "of logits that reach about 10"
        if same is not None:
            best, second = rows[same].float().topk(2).values.tolist()
            assert best - second < 0.5


def test_listening_changes_nothing(stage):
    """The watcher of these tests gives the tokens of an unwatched engine."""
    _, model = make_pair("llama")
    request = ask("a", [5, 6, 7], max_tokens=4, ignore_eos=True)
    watched, _ = crowd_logits(stage, model, [request])["a"]
    assert watched == tokens(run(build(stage, model), [request])["a"])
