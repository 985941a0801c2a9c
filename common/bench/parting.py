"""Where two stages' answers part, and how close the two tokens were: a tie broken by rounding, or a fault?"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from common.config import EngineConfig
from common.generate import drive
from common.protocol import Model, Request
from common.sampling_params import SamplingParams
from common.stages import find_stage


@dataclass(frozen=True)
class Parting:
    """The first place at which a stage's answer differs from the first stage's.

    Attributes:
        request_id: whose answer.
        stage: the one that differs from `reference`.
        position: tokens that both answers have in common.
        tokens: (the reference's, the stage's) next token; None where an answer has ended.
        gap: logit of the reference's token minus logit of the stage's, both computed by the reference from
            the common beginning in one forward: how far the stage's rounding would have had to move them.
            (That forward rounds in its own way too, so a tie may come out slightly negative.)  None where an
            answer has ended.
    """

    request_id: str
    reference: str
    stage: str
    position: int
    tokens: tuple[int | None, int | None]
    gap: float | None


def find_partings(
    answers: Mapping[str, Seq[Seq[int]]], model: Model, config: EngineConfig, requests: Seq[Request]
) -> list[dict[str, Any]]:
    """Compare every stage's answers with the first stage's.

    Args:
        answers: stage -> token ids of each request's answer.
        model: to compute the gaps with.
        config: the engines'.
        requests: in the order of the answers.

    Returns:
        `Parting`s as dicts; none if all answers are the same, token for token.
    """
    reference, *others = answers
    partings = []
    for stage in others:
        for request, right, other in zip(requests, answers[reference], answers[stage], strict=True):
            position = common_length(right, other)
            if position == len(right) == len(other):
                continue
            a = right[position] if position < len(right) else None
            b = other[position] if position < len(other) else None
            gap = None
            if a is not None and b is not None:
                gap = _gap(reference, model, config, [*request.prompt_token_ids, *right[:position]], a, b)
            partings.append(asdict(Parting(request.request_id, reference, stage, position, (a, b), gap)))
    return partings


def common_length(a: Seq[int], b: Seq[int]) -> int:
    """How many first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _gap(stage: str, model: Model, config: EngineConfig, tokens: list[int], a: int, b: int) -> float:
    """Logit of a minus logit of b after these tokens (a difference of log probabilities is one of logits)."""
    engine = find_stage(stage)[1].resolve()(model, config)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    outputs = [o for step in drive(engine, [Request("gap", tuple(tokens), params)]) for o in step]
    assert outputs[0].logprobs is not None  # they were asked for
    row = outputs[0].logprobs[0]
    return row[a].logprob - row[b].logprob
