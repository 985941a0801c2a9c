"""What every engine does alike at a request's two ends: checking it in, and accounting for a step."""

from __future__ import annotations

from collections.abc import Collection

from common.batch import Scheduled
from common.config import EngineConfig
from common.errors import InvalidValue
from common.model.config import ModelConfig
from common.protocol import EngineStats, Request, SampledToken, StepOutput
from common.sequence import Sequence


def check_in(
    request: Request, live: Collection[Sequence], model: ModelConfig, config: EngineConfig, stats: EngineStats
) -> list[Sequence]:
    """Refuse what can never be served, else make the request's `n` sequences.

    Raises:
        InvalidValue: names the field, the value and the range; nothing has changed.
    """
    check_request(request, model, config)
    if any(seq.request_id == request.request_id for seq in live):
        raise InvalidValue("request_id", request.request_id, "an id that no live request has")
    stats.requests_added += 1
    stats.prompt_tokens += len(request.prompt_token_ids)
    return [Sequence(request, index, config.seed) for index in range(request.params.n)]


def check_request(request: Request, model: ModelConfig, config: EngineConfig) -> None:
    """Raise InvalidValue unless the request's ids and lengths fit the model and the engine."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise InvalidValue("prompt_token_ids", [], "at least one token")
    if len(prompt) >= config.max_model_len:
        raise InvalidValue(
            "prompt_token_ids",
            f"{len(prompt)} tokens",
            f"at most {config.max_model_len - 1} tokens (max_model_len={config.max_model_len}, "
            "one of them for the answer)",
        )
    ids = f"token ids from 0 to {model.vocab_size - 1}"
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        raise InvalidValue("prompt_token_ids", next(t for t in prompt if not 0 <= t < model.vocab_size), ids)
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, field) or ():
            if token >= model.vocab_size:
                raise InvalidValue(field, token, ids)


def advance(
    scheduled: Scheduled,
    sampled: list[SampledToken | None],
    model: ModelConfig,
    config: EngineConfig,
    stats: EngineStats,
) -> list[StepOutput]:
    """Book one forward: tokens are computed, the drawn ones appended, ends noticed, counters moved."""
    outputs = []
    for (seq, num_new), token in zip(scheduled, sampled, strict=True):
        seq.num_computed_tokens += num_new
        stats.tokens_computed += num_new
        if token is not None:
            outputs.append(seq.append(token, model.eos_token_ids, config.max_model_len))
            stats.tokens_emitted += 1
            stats.requests_finished += seq.finished
    stats.forwards += 1
    return outputs
