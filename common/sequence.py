"""One answer in the making: its tokens, how far they are computed, and its own random generator."""

from __future__ import annotations

import random

from common.protocol import Counters, FinishReason, Request, SampledToken, StepOutput, TokenLogprobs
from common.sampling_params import SamplingParams


class Sequence:
    """Prompt and answer of one of a request's `n` answers.

    A sequence owns all that must survive when it loses its memory: tokens, generator, counters.  So giving
    it back to the queue is "free the table, set `num_computed_tokens` to zero" and nothing else.

    Attributes:
        token_ids: prompt, then answer.
        num_computed_tokens: how many of them have been through the model (their K/V, if it is kept at all,
            is in the cache).
        block_table: physical blocks in logical order (paged stages).
        block_hashes: names of its full blocks, as far as they were needed (stage 5 on).
        matcher: where the answer is in the request's grammar, if it has one.
        rng: drawn from exactly once per sampled token.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "counters",
        "finish_reason",
        "index",
        "matcher",
        "num_computed_tokens",
        "num_prompt_tokens",
        "prompt_logprobs",
        "request",
        "rng",
        "stop_reason",
        "token_ids",
        "unused_uniform",
    )

    def __init__(self, request: Request, index: int = 0, engine_seed: int = 0) -> None:
        self.request = request
        self.index = index
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.counters = Counters(prompt_tokens=self.num_prompt_tokens)
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.matcher = None if request.grammar is None else request.grammar.start()
        # A request's own seed must not see its neighbours: the same seed and prompt give the same text
        # wherever it stands in a list.  Without a seed, the id makes two requests differ.
        seed = self.params.seed
        origin = f"{engine_seed}/{request.request_id}" if seed is None else f"{seed}"
        self.rng = random.Random(f"{origin}/{index}")
        self.unused_uniform: float | None = None

    @property
    def request_id(self) -> str:
        """The request this answer belongs to."""
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def num_output_tokens(self) -> int:
        """Length of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The answer so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt must still be scored."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def uniform(self) -> float:
        """The next number of its generator, or one that was drawn before and came to nothing."""
        number, self.unused_uniform = self.unused_uniform, None
        return self.rng.random() if number is None else number

    def append(self, token: SampledToken, eos_token_ids: frozenset[int], max_len: int) -> StepOutput:
        """Take a sampled token, decide whether it ends the answer, and say what happened.

        `min_tokens` needs no check here: the sampler cannot draw an ending token before it.  A grammar that
        has no way on ends the answer without the token, as "length": to a client the text is cut short.
        """
        if self.matcher is not None and not self.matcher.advance(token.token_id):
            self.finish_reason, self.stop_reason = FinishReason.LENGTH, "grammar"
            return self._ended_without_token()
        self.token_ids.append(token.token_id)
        self.counters.output_tokens += 1
        first = self.num_output_tokens == 1
        params = self.params
        if token.token_id in params.stop_token_ids:  # type: ignore[operator]  # a tuple
            self.finish_reason, self.stop_reason = FinishReason.STOP, token.token_id
        elif token.token_id in eos_token_ids and not (params.ignore_eos and self.matcher is None):
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens == params.max_tokens or len(self.token_ids) >= max_len:
            self.finish_reason = FinishReason.LENGTH
        wants_prompt = first and params.prompt_logprobs is not None
        return StepOutput(
            request_id=self.request_id,
            index=self.index,
            new_token_ids=(token.token_id,),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if token.logprobs is None else (token.logprobs,),
            prompt_logprobs=tuple(self.prompt_logprobs) if wants_prompt else None,
            counters=self.counters,
        )

    def abort(self) -> StepOutput:
        """End without a token."""
        self.finish_reason = FinishReason.ABORT
        return self._ended_without_token()

    def _ended_without_token(self) -> StepOutput:
        return StepOutput(
            self.request_id, self.index, (), self.finish_reason, self.stop_reason, counters=self.counters
        )
