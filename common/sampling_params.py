"""How one request wants its tokens chosen and when it wants to stop; names and defaults are vLLM's."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.errors import InvalidValue

INT64 = 2**63
COLLECTIONS = {
    "stop": "a string or a list of non-empty strings",
    "bad_words": "a list of non-empty strings",
    "stop_token_ids": "a list of token ids of at least 0",
    "allowed_token_ids": "a list of at least one token id of at least 0",
}


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling and stopping rules.

    Order of work on a row of logits (vLLM's): logprobs are read from the raw logits; then allowed tokens,
    bad words, `min_tokens`, logit bias, penalties, the request's grammar, temperature, min-p, top-k, top-p, and
    the draw.  Tokens of equal logit count as ordered by id, the lowest first.

    Attributes:
        n: answers per prompt.
        temperature: 0 is greedy (so is anything below 1e-5): top-k, top-p, min-p and seed do nothing then.
        top_k: keep the k likeliest tokens; 0, -1 and numbers beyond the vocabulary keep all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p, out of what top-k and
            min-p left; 1 keeps all.
        min_p: drop tokens below min_p times the likeliest one's probability.
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for generated tokens.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer.
        seed: makes the answer repeatable, alone or in any batch; None (and -1, as in vLLM) draws from the
            engine's seed.
        stop: strings that end the answer, wherever the token boundaries fall.
        stop_token_ids: ids that end the answer, also under `ignore_eos`.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: go on past the model's own end-of-sequence ids.
        max_tokens: most tokens of the answer; None means as far as the context reaches.
        min_tokens: no end (EOS, stop id, stop string) before so many tokens; until then EOS ids (also under
            `ignore_eos`) and stop ids cannot be drawn.
        logprobs: report the chosen token and so many of the likeliest ones; -1 reports the whole vocabulary.
        prompt_logprobs: the same for each prompt token.
        logit_bias: added to the logits of these ids, each within -100..100.
        bad_words: words that must not appear in the answer (turned into token ids by the tokenizer's owner).
        allowed_token_ids: if set, nothing else can be drawn.  `bad_words` and `min_tokens` give way in a step
            where they would leave no token at all, and all three to a grammar.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Seq[str] | None = None
    allowed_token_ids: Seq[int] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._freeze_collections()
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidValue(field, getattr(self, field), "True or False")
        _number("temperature", self.temperature, 0.0, math.inf, "a finite number of at least 0")
        _number("top_p", self.top_p, math.nextafter(0.0, 1.0), 1.0, "a number above 0 and at most 1")
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        for field in ("presence_penalty", "frequency_penalty"):
            _number(field, getattr(self, field), -2.0, 2.0, "a number from -2 to 2")
        _number("repetition_penalty", self.repetition_penalty, math.nextafter(0.0, 1.0), math.inf,
                "a finite number above 0")  # fmt: skip
        _integer("n", self.n, 1, 16384, "an integer from 1 to 16384")
        _integer("top_k", self.top_k, -1, INT64 - 1, "an integer of at least -1 (-1 and 0 keep all)")
        _integer("min_tokens", self.min_tokens, 0, INT64 - 1, "an integer of at least 0")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, INT64 - 1, "an integer of at least 1, or None")
            if self.min_tokens > self.max_tokens:
                raise InvalidValue("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.seed is not None:
            _integer("seed", self.seed, -INT64, INT64 - 1, "a 64-bit integer, or None")
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _integer(field, getattr(self, field), -1, INT64 - 1, "an integer of at least -1, or None")
        self._check_collections()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is simply taken (also for temperatures that would overflow)."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        return self.stop  # type: ignore[return-value]  # a tuple since __post_init__

    def _freeze_collections(self) -> None:
        """Turn every list and dict into something that the caller can no longer change under us."""
        if self.stop is None or isinstance(self.stop, str):
            object.__setattr__(self, "stop", () if self.stop is None else (self.stop,))
        for field, allowed in COLLECTIONS.items():
            value = getattr(self, field)
            if value is None:
                value = None if field == "allowed_token_ids" else ()
            elif isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
                raise InvalidValue(field, value, allowed)
            else:
                value = tuple(value)
            object.__setattr__(self, field, value)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidValue("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_collections(self) -> None:
        for field in ("stop", "bad_words"):
            for text in getattr(self, field):
                if not isinstance(text, str) or not text:
                    raise InvalidValue(field, text, COLLECTIONS[field])
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidValue("allowed_token_ids", self.allowed_token_ids, COLLECTIONS["allowed_token_ids"])
        for field in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, field) or ():
                _integer(field, token, 0, INT64 - 1, COLLECTIONS[field])
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0, INT64 - 1, "token ids of at least 0 as keys")
            _number("logit_bias", bias, -100.0, 100.0, "values from -100 to 100")


def _integer(field: str, value: object, low: int, high: int, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidValue(field, value, allowed)


def _number(field: str, value: object, low: float, high: float, allowed: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared first: NaN is in no range, and an integer too large for a float is, where `high` is infinite.
    if not number or not low <= value <= min(high, sys.float_info.max):  # type: ignore[operator]
        raise InvalidValue(field, value, allowed)
