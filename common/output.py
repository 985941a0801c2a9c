"""From step outputs to what the user gets: text, stop strings, finish reasons; one result per request.

The engine knows no text.  As in vLLM v1, stop strings are found here, after the engine has taken its step,
and the caller aborts in the engine what they have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.detokenizer import IncrementalDetokenizer
from common.errors import InvalidValue
from common.protocol import Counters, FinishReason, Logprob, Request, StepOutput, TokenLogprobs
from common.stop_strings import StopStrings
from common.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's `n` answers, as far as it is; later outputs never change an earlier one.

    Attributes:
        index: which of the `n`.
        text: all that has been sent so far: never part of a stop string, never half a character.
        delta: the end of `text` that is new since the request's output before this one.
        token_ids: up to the one that ended the answer, that one included.
        cumulative_logprob: sum over the chosen tokens, if log probabilities were asked for.
        logprobs: one mapping of token id to its log probability per token, if asked for.
        finish_reason: "stop", "length", "abort", or None while it goes on.
        stop_reason: the stop string or stop id that ended it, "grammar" where one had no way on; else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    delta: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers in index order.

    `prompt_logprobs` has one entry per prompt token, if asked for; the first is None.  `counters` are
    those of all answers together.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    counters: Counters = field(default_factory=Counters)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache when the request was first let in."""
        return self.counters.cached_tokens


class OutputProcessor:
    """The text side of all live requests."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer every text stays empty, and stop strings are refused."""
        self._tokenizer = tokenizer
        self._live: dict[str, _LiveRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is live: added, and not all of its answers ended."""
        return request_id in self._live

    def add(self, request: Request, prompt: str | None = None, stream: bool = True) -> None:
        """Expect step outputs of a request.

        Args:
            request: as the engine gets it.
            prompt: its text, if it came as text; handed through.
            stream: report after every step; else once, at the end.

        Raises:
            InvalidValue: the id is live, or there are stop strings and no tokenizer to make text with.
        """
        if request.request_id in self._live:
            raise InvalidValue("request_id", request.request_id, "an id that no live request has")
        stops = request.params.stop_strings
        if stops and self._tokenizer is None:
            raise InvalidValue("stop", stops, "no stop strings where there is no tokenizer")
        self._live[request.request_id] = _LiveRequest(request, prompt, stream, self._tokenizer)

    def process(
        self, step_outputs: Iterable[StepOutput]
    ) -> tuple[list[RequestOutput], list[tuple[str, int]]]:
        """Take what a step did.

        A step output for an answer that has ended is a late word (the engine's own, on its abort) and is
        dropped, so no text follows an end.

        Returns:
            The requests that have news, each once, and the (request id, index) of every answer that a stop
            string has ended and that the caller must now abort in the engine.
        """
        touched: dict[str, _LiveRequest] = {}
        to_abort = []
        for out in step_outputs:
            live = self._live.get(out.request_id)
            if live is None or live.answers[out.index].finished:
                continue
            touched[out.request_id] = live
            live.take(out)
            if live.answers[out.index].finished and out.finish_reason is None:
                to_abort.append((out.request_id, out.index))
        return [self._report(live) for live in touched.values() if live.stream or live.finished], to_abort

    def abort(self, request_id: str) -> RequestOutput | None:
        """End all of a request that has not ended; its last output, or None for an id that is not live."""
        live = self._live.get(request_id)
        if live is None:
            return None
        for answer in live.answers:
            if not answer.finished:
                answer.take(
                    StepOutput(request_id, answer.index, (), FinishReason.ABORT, counters=answer.counters)
                )
        return self._report(live)

    def _report(self, live: _LiveRequest) -> RequestOutput:
        if live.finished:
            del self._live[live.request.request_id]
        return live.report()


class _LiveRequest:
    """A request's answers until all have ended."""

    def __init__(
        self, request: Request, prompt: str | None, stream: bool, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.stream = stream
        self.answers = [_Answer(request, index, tokenizer) for index in range(request.params.n)]
        self._prompt = prompt
        self._prompt_token_ids = list(request.prompt_token_ids)  # one for all outputs: it never changes
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    def take(self, out: StepOutput) -> None:
        if out.prompt_logprobs is not None:
            self._prompt_logprobs = [None if row is None else dict(row) for row in out.prompt_logprobs]
        self.answers[out.index].take(out)

    def report(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[answer.report() for answer in self.answers],
            finished=self.finished,
            counters=self._counters(),
        )

    def _counters(self) -> Counters:
        """What all answers cost together; the prompt and what was cached of it count once."""
        each = [answer.counters for answer in self.answers]
        return Counters(
            prompt_tokens=len(self._prompt_token_ids),
            output_tokens=sum(c.output_tokens for c in each),
            cached_tokens=max(c.cached_tokens for c in each),
            forwards=sum(c.forwards for c in each),
            tokens_computed=sum(c.tokens_computed for c in each),
            preemptions=sum(c.preemptions for c in each),
        )


class _Answer:
    """One answer: its tokens, and its text on the way from bytes to what may be sent."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._detokenizer = tokenizer and IncrementalDetokenizer(
            tokenizer, request.prompt_token_ids, params.skip_special_tokens
        )
        self.counters = Counters()
        self._sent = ""  # text of the reports so far
        self._unsent: list[str] = []

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, out: StepOutput) -> None:
        """Take new tokens one by one, up to one that completes a stop string; then the end, if any."""
        self.counters = out.counters
        last = len(out.new_token_ids) - 1
        for i, token_id in enumerate(out.new_token_ids):
            self._token_ids.append(token_id)
            if out.logprobs is not None:
                self._take_logprobs(token_id, out.logprobs[i])
            # The text of a stop token is no part of the answer, unless it is asked for (as in vLLM).
            ends = out.finish_reason is FinishReason.STOP and i == last
            if self._detokenizer and (not ends or self._params.include_stop_str_in_output):
                self._take_text(self._detokenizer.append((token_id,)))
            if self.finished:
                return
        if out.finish_reason is not None:
            self._end(out.finish_reason, out.stop_reason)

    def report(self) -> CompletionOutput:
        delta = "".join(self._unsent)
        self._sent += delta
        self._unsent.clear()
        return CompletionOutput(
            index=self.index,
            text=self._sent,
            token_ids=self._token_ids.copy(),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs.copy(),
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            delta=delta,
        )

    def _take_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> None:
        if self._logprobs is not None:
            self._logprobs.append(dict(logprobs))
            self._cumulative_logprob += logprobs[token_id].logprob

    def _take_text(self, text: str) -> None:
        safe, stop = self._stops.push(text, may_end=len(self._token_ids) > self._params.min_tokens)
        self._unsent.append(safe)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """The engine ends it: half a character becomes a mark, and what was held back is plain text."""
        if self._detokenizer:
            self._take_text(self._detokenizer.flush())
        if not self.finished:
            self.finish_reason, self.stop_reason = reason, stop_reason
            self._unsent.append(self._stops.flush())
