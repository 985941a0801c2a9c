"""Compare a crowd with each of its members alone: the answers must not know about each other."""

from __future__ import annotations

from support.engines import ask, build, run, tokens
from support.hf import tiny_pair


def crowd() -> list:
    """Ten requests, greedy and seeded, prompts of 1 to 23 tokens, answers of 3 to 12."""
    requests = []
    for i in range(10):
        prompt = [(11 * i + 5 * j + j * j) % 97 for j in range(1 + (i * 7) % 23)]
        sampling = {"temperature": 1.0, "seed": i} if i % 2 else {}
        requests.append(ask(str(i), prompt, max_tokens=3 + i % 10, ignore_eos=True, logprobs=1, **sampling))
    return requests


def solo_answers(variant: str = "llama") -> dict[str, list[int]]:
    """Each request alone in a fresh stage 1 engine."""
    model = tiny_pair(variant)[1]
    return {
        request.request_id: tokens(run(build("stage1_naive", model), [request])[request.request_id])
        for request in crowd()
    }
