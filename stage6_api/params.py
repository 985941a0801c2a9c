"""From a request's fields to the engine's request: defaults, and the limits that depend on what is served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.beam_params import BeamSearchParams
from common.errors import InvalidValue
from common.lifecycle import check_request
from common.protocol import Request
from common.sampling_params import SamplingParams
from common.structured import CompiledGrammar, Grammar
from stage6_api.errors import bad_request, unsupported
from stage6_api.prompts import Prompt
from stage6_api.schemas import INT64_MAX, INT64_MIN, SamplingFields
from stage6_api.served import Served

COMPILE_SECONDS = 10.0
PRIORITY_HEADER = "x-vllm-priority"
# What beam search, which draws nothing and looks at raw scores only, cannot honour.
NOT_WITH_BEAMS = ("stop", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "presence_penalty",
                  "frequency_penalty", "repetition_penalty", "prompt_logprobs")  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What an endpoint has found out before the common fields are read.

    Attributes:
        max_tokens: as asked for; None is the rest of the context.
        logprobs, prompt_logprobs: alternatives per token, or None.
        grammar: that the answer must follow.
        skip_special_tokens: whether the text leaves them out.
        priority: smaller goes first.
    """

    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: CompiledGrammar | None
    skip_special_tokens: bool
    priority: int


def check_fields(served: Served, body: SamplingFields) -> None:
    """Checks that both endpoints share and that need no prompt.

    Raises:
        ApiError: names the field.
    """
    served.check_model(body.model)
    if (
        body.stream_options is not None
        and not body.stream
        and body.stream_options.model_dump(exclude_none=True)
    ):
        raise bad_request("stream_options is only allowed with stream=true", "stream_options")
    for field, value in _unsupported(body):
        raise unsupported(field, value)
    for field in ("logprobs", "top_logprobs", "prompt_logprobs"):
        _check_count(field, getattr(body, field, None), served.settings.max_logprobs)
    if body.stream and (body.prompt_logprobs or 0) != 0:
        raise bad_request("prompt_logprobs above 0 are not available with stream=true", "prompt_logprobs")
    if body.use_beam_search:
        _check_beam_search(served, body)
    elif body.length_penalty not in (None, 1.0):
        raise bad_request("length_penalty is only allowed with use_beam_search=true", "length_penalty")


def _unsupported(body: SamplingFields) -> list[tuple[str, str]]:
    """(field, why) of what the contract knows, this server does not serve, and silence would hide."""
    extra = body.model_extra or {}
    found = []
    if getattr(body, "suffix", None):
        found.append(("suffix", "the model does not fill in the middle"))
    if (getattr(body, "best_of", None) or extra.get("best_of") or 1) != 1:
        found.append(("best_of", "ask for n answers and choose among them"))
    if set(getattr(body, "modalities", None) or ["text"]) != {"text"} or extra.get("audio") is not None:
        found.append(("modalities", "only text can be answered"))
    reasons = {
        "web_search_options": "there is no web search",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "prompt_embeds": "send text or token ids",
        "logits_processors": "use logit_bias",
    }
    return found + [(name, why) for name, why in reasons.items() if extra.get(name) is not None]


def _check_count(field: str, count: int | bool | None, most: int) -> None:
    """Alternatives per token: no more than the operator allows."""
    if count is None or isinstance(count, bool) or most == -1:
        return
    if count == -1 or count > most:
        raise bad_request(f"{field}: got {count}, allowed: at most {most}", field)


def _check_beam_search(served: Served, body: SamplingFields) -> None:
    if not served.engine.engine.capabilities.beam_search:
        raise unsupported("use_beam_search", f"{served.stage} has no beam search")
    if body.stream:
        raise bad_request("Streaming is not currently supported with beam search", "stream")
    if body.echo and getattr(body, "logprobs", None) is not None:
        raise bad_request("echo with logprobs is not supported with beam search", "echo")
    if getattr(body, "logprobs", None) or getattr(body, "top_logprobs", None):
        raise bad_request("beam search reports the log probability of its own tokens only", "logprobs")
    for field in NOT_WITH_BEAMS:
        if getattr(body, field):
            raise bad_request(f"{field} is not supported with beam search", field)
    if body.response_format or body.structured_outputs:
        raise bad_request("structured output is not supported with beam search", "response_format")


def asked_max_tokens(served: Served, body: SamplingFields, *fields: str) -> int | None:
    """The first of the fields that is set, or None.

    Raises:
        ApiError: it is 0, or more than the whole context.
    """
    for field in fields:
        asked: int | None = getattr(body, field)
        if asked is not None and not 1 <= asked <= served.max_len:
            allowed = f"1 to {served.max_len}, the model's maximum context length"
            raise bad_request(f"{field}: got {asked}, allowed: {allowed}", field)
        if asked is not None:
            return asked
    return None


def read_priority(served: Served, body: SamplingFields, header: str | None) -> int:
    """The request's priority; a header of the gateway's overrides the body's.

    Raises:
        ApiError: no 64-bit integer, or the engine serves in order of arrival.
    """
    priority = body.priority or 0
    if header is not None:
        digits = header.strip().lstrip("+-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise bad_request("X-Vllm-Priority must be a 64-bit integer", "priority")
        priority = int(header)
    if not INT64_MIN <= priority <= INT64_MAX:
        raise bad_request("X-Vllm-Priority must be a 64-bit integer", "priority")
    if priority and served.engine.engine.config.policy != "priority":
        raise unsupported("priority", "this server was not started with --scheduling-policy priority")
    return priority


async def compile_grammar(served: Served, grammar: Grammar | None) -> CompiledGrammar | None:
    """Compile off the event loop, within a time limit.

    Raises:
        ApiError: it takes too long.
        InvalidValue: the grammar is malformed.
    """
    if grammar is None:
        return None
    try:
        compiling = asyncio.to_thread(lambda: served.grammars.compile(grammar))
        return await asyncio.wait_for(compiling, COMPILE_SECONDS)
    except asyncio.TimeoutError:
        raise bad_request(
            f"the grammar takes more than {COMPILE_SECONDS:g} s to compile", grammar.field
        ) from None


def engine_requests(
    served: Served, body: SamplingFields, prompts: Sequence[Prompt], wanted: Wanted
) -> list[Request]:
    """The engine's request for each prompt, checked as far as the engine itself will check it.

    Raises:
        ApiError, InvalidValue: a parameter is out of range.
    """
    bad_words = served.tokenizer.bad_words_token_ids(body.bad_words or ())
    model, config = served.engine.engine.model.config, served.engine.engine.config
    requests = []
    for prompt in prompts:
        params = _sampling_params(served, body, wanted, len(prompt.token_ids))
        beam = _beam(body, params) if body.use_beam_search else None
        request = Request(
            request_id=served.engine_id(),
            prompt_token_ids=tuple(prompt.token_ids),
            params=params if beam is None else beam.sampling_params(),
            bad_words_token_ids=bad_words,
            priority=wanted.priority,
            cache_salt=body.cache_salt,
            beam=beam,
            grammar=wanted.grammar,
        )
        check_request(request, model, config)
        requests.append(request)
    return requests


def _sampling_params(served: Served, body: SamplingFields, wanted: Wanted, num_prompt: int) -> SamplingParams:
    most, minimum = wanted.max_tokens, body.min_tokens or 0
    room = served.max_len - num_prompt
    if most is not None and minimum > most:
        raise bad_request(f"min_tokens: got {minimum}, allowed: at most max_tokens={most}", "min_tokens")
    most = room if most is None else min(most, room)
    given = {
        name: getattr(body, name)
        for name in ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                     "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
                     "ignore_eos", "allowed_token_ids", "bad_words")
        if getattr(body, name) is not None
    }  # fmt: skip
    return SamplingParams(
        max_tokens=most,
        min_tokens=min(minimum, most),
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        skip_special_tokens=wanted.skip_special_tokens,
        **given,
    )


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Keys as token ids, values held within -100..100 (as OpenAI's and vLLM's are)."""
    if not bias:
        return None
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise bad_request(f"logit_bias: the key {key[:50]!r} is no token id", "logit_bias")
        found[int(key)] = min(max(value, -100.0), 100.0)
    return found


def _beam(body: SamplingFields, params: SamplingParams) -> BeamSearchParams:
    options: dict[str, Any] = {"length_penalty": 1.0 if body.length_penalty is None else body.length_penalty}
    try:
        return BeamSearchParams(
            beam_width=params.n,
            n=params.n,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids or (),
            include_stop_str_in_output=params.include_stop_str_in_output,
            **options,
        )
    except InvalidValue as error:
        raise bad_request(str(error), error.field) from error
