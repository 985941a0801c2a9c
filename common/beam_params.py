"""How one request wants its beam search done; the names are vLLM's, and transformers' where vLLM has none."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from common.errors import InvalidValue
from common.sampling_params import SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """One request's beam search.  Its answers are those of transformers' `generate(num_beams=...)`.

    Beams are scored by the raw log probabilities: there is no temperature, and nothing is drawn.

    Attributes:
        beam_width: partial answers that are kept at each step, and places for finished ones.
        n: answers to return, best first (transformers' `num_return_sequences`).
        max_tokens: most tokens of an answer; None means as far as the context reaches.
        length_penalty: exponent of the length that divides a finished answer's log probability.  Above 0
            favours long answers, below 0 short ones, 0 compares the plain sums.
        early_stopping: when the search is over, once `beam_width` answers are finished.  True: at once.
            False: if the best live beam, divided by its present length, is no better than the worst of
            them.  "never": if it could not become better at any length (with a positive penalty: at the
            largest).
        ignore_eos: the model's own end-of-sequence ids end nothing.
        stop_token_ids: ids that end a beam, also under `ignore_eos`.
        include_stop_str_in_output: keep the text of the ending token.
        skip_special_tokens: leave special tokens out of the text.
    """

    beam_width: int
    n: int = 1
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: Seq[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        width = self.beam_width
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise InvalidValue("beam_width", width, "an integer of at least 1")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or not 1 <= self.n <= width:
            raise InvalidValue("n", self.n, f"an integer from 1 to beam_width={width}")
        penalty = self.length_penalty
        number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
        if not number or not -10 <= penalty <= 10:
            raise InvalidValue("length_penalty", penalty, "a number from -10 to 10")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidValue("early_stopping", self.early_stopping, "True, False or 'never'")
        shared = self.sampling_params()  # checks the fields that the two classes share
        object.__setattr__(self, "stop_token_ids", shared.stop_token_ids)  # a tuple now

    def sampling_params(self) -> SamplingParams:
        """What the search looks like from outside: `n` answers with the log probability of each token."""
        return SamplingParams(
            n=self.n,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=0,
        )

    def ends(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """The ids that end a beam, of a model with these end-of-sequence ids."""
        return frozenset(() if self.ignore_eos else eos_token_ids) | frozenset(self.stop_token_ids)

    def score(self, logprob: float, num_tokens: int) -> float:
        """By what answers are compared, the larger the better.

        Args:
            logprob: sum over the answer's tokens.
            num_tokens: its length, the ending token included.
        """
        return logprob / num_tokens**self.length_penalty
