"""The seams between user, engine, memory and model: what is passed, and what each side promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from common.batch import ForwardBatch, Scheduled
from common.beam_params import BeamSearchParams
from common.config import EngineConfig
from common.sampling_params import SamplingParams

if TYPE_CHECKING:
    from common.model.config import ModelConfig
    from common.sequence import Sequence
    from common.structured import CompiledGrammar


class FinishReason(str, Enum):
    """Why an answer ended; the values are the OpenAI API's words."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, the end of the context, or a grammar without a way on
    ABORT = "abort"  # the caller took the request back


@dataclass(frozen=True)
class Request:
    """One prompt as an engine takes it: token ids only, since engines know no text.

    `bad_words_token_ids` holds the token sequences that spell `params.bad_words`, made by whoever owns the
    tokenizer.  With `beam` the answers are found by beam search, and `params` are `beam.sampling_params()`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    grammar: CompiledGrammar | None = None  # what the answer must look like; made by who owns the tokenizer
    cache_salt: str | None = None  # only requests of one salt share cached prefixes (stage 5 on)
    beam: BeamSearchParams | None = None


@dataclass(frozen=True)
class Logprob:
    """A token's log probability under the raw logits (before bias, penalties and temperature)."""

    logprob: float
    rank: int  # 1 is the likeliest token


TokenLogprobs = Mapping[int, Logprob]
"""Token id -> its log probability, for the chosen token and the likeliest ones."""


@dataclass(frozen=True)
class SampledToken:
    """What one row of logits became."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass
class Counters:
    """What one answer has cost so far.  Its sequence keeps counting; whoever is shown it only reads."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    forwards: int = 0  # in which it took part
    tokens_computed: int = 0  # of its own, over all forwards
    preemptions: int = 0  # how often it lost its memory


@dataclass(frozen=True)
class StepOutput:
    """What one step did for one sequence (`index` tells the `n` answers of a request apart).

    An engine speaks of a sequence only when something happened: new tokens, an end, or both.
    `prompt_logprobs` comes once, with the first token; its first entry is None (nothing precedes it).
    """

    request_id: str
    index: int
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id, or "grammar" where one had no way on; else None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True)
class Capabilities:
    """What a stage can do.  Stated, not guessed: contract tests skip by these, with the reason."""

    remembers_kv: bool = False  # computes each token once (stage 2 on)
    batches: bool = False  # several requests in one forward (stage 2 on)
    paged: bool = False  # memory in blocks (stage 3 on)
    preempts: bool = False  # may take a running request's memory back (stage 3 on)
    continuous: bool = False  # joins and leaves at every step (stage 4 on)
    chunks_prompts: bool = False  # spreads a prompt over steps (stage 4 on)
    shares_prefixes: bool = False  # stage 5 on
    beam_search: bool = False  # stage 5 on


@dataclass
class CacheCounters:
    """What a prefix cache has done so far, in prompt tokens and in blocks (stage 5 on)."""

    queries: int = 0  # prompt tokens of the sequences let in, each once; what is forked asks for nothing
    hits: int = 0  # of those, tokens that were found
    evictions: int = 0  # blocks that could be found and were needed for something else
    copies: int = 0  # blocks copied since one of their owners was about to write

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found."""
        return self.hits / self.queries if self.queries else 0.0


@dataclass
class EngineStats:
    """Counters only ever grow, and no engine reads a clock: benchmarks time, engines count."""

    forwards: int = 0
    tokens_computed: int = 0  # rows that went through the model
    tokens_emitted: int = 0  # tokens that became part of an answer
    prompt_tokens: int = 0  # of the requests added
    requests_added: int = 0
    sequences_finished: int = 0
    sequences_aborted: int = 0
    slot_steps: int = 0  # forwards x max_num_seqs: the places a batch could have had
    idle_slot_steps: int = 0  # of those, the places in which nothing was computed
    preemptions: int = 0
    cache: CacheCounters = field(default_factory=CacheCounters)

    @property
    def computed_per_emitted(self) -> float:
        """Tokens computed per token emitted: the waste that stage 2 removes."""
        return self.tokens_computed / self.tokens_emitted if self.tokens_emitted else 0.0


@dataclass(frozen=True)
class Span:
    """One sequence's stretch of KV memory, in token slots, for pictures and for counting waste."""

    request_id: str
    index: int
    start: int  # first slot
    reserved: int  # slots that nobody else can use
    used: int  # of those, slots that hold a token's K/V


@dataclass(frozen=True)
class KVUsage:
    """KV memory at one moment, in token slots."""

    capacity: int
    reserved: int
    used: int
    bytes_per_token: int

    @property
    def free(self) -> int:
        """Slots that no sequence has."""
        return self.capacity - self.reserved


class KVBackend(Protocol):
    """Where K/V lives and how attention reads it: the one thing that changes from stage 1 to 3.

    An argument of `forward`, never a global.  Allocation is each stage's own business (it answers None when
    it cannot); the model only ever sees `attend`.

    Attributes:
        max_len: longest prompt + answer that the cache can carry when one sequence has it to itself.
    """

    max_len: int

    def prepare(self, batch: ForwardBatch, scheduled: Scheduled) -> None:
        """Fill in what `attend` will need in every layer (slots, block tables), once per forward.

        The batch is still on the host; with what is filled in here, it then goes to the model's device.
        """

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store this layer's new K/V, then attend causally over all that each sequence has.

        Args:
            layer: index of the layer.
            q: `[T, Hq, D]`, rotated.  May be a strided view; the last dimension is contiguous.
            k: `[T, Hkv, D]`, rotated.  Likewise.
            v: `[T, Hkv, D]`.  Likewise.
            batch: whose tokens these are.

        Returns:
            `[T, Hq * D]`, contiguous.
        """
        ...

    def check_fits(self, request: Request) -> None:
        """Raise InvalidValue, with the numbers, if even an empty cache could not take the request."""

    def usage(self) -> KVUsage:
        """Count of slots now."""
        ...

    def spans(self) -> list[Span]:
        """Each sequence's stretches now, in slot order."""
        ...


class Model(Protocol):
    """A decoder over packed tokens; tests put a scripted one in its place."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: ForwardBatch, kv: KVBackend) -> torch.Tensor:
        """Logits `[R, V]` of the batch's `logits_rows`."""
        ...


class Executor(Protocol):
    """(sequences, new tokens each) -> next tokens.  The simulator is another one."""

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """Run one forward and draw a token for each sequence that has caught up, None for the others."""
        ...


class Engine(Protocol):
    """What every stage is, from the outside."""

    capabilities: Capabilities
    model: Model
    config: EngineConfig
    executor: Executor  # a recorder may stand in its place
    stats: EngineStats
    live: dict[str, list[Sequence]]  # request id -> its unfinished sequences
    last_batch: Scheduled  # what the last step's forward computed; for whoever watches

    @property
    def kv(self) -> KVBackend:
        """Where this stage keeps K/V."""
        ...

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidValue: it can never be served (empty or too long prompt, id outside the vocabulary, more
                KV than there is), or a live request has the same id.  Nothing changes then.
        """

    def abort(self, request_id: str, index: int | None = None) -> list[StepOutput]:
        """Take a request back, or one of its `n` answers: no token of it comes any more.

        Its memory is free at once, or, in a stage whose batches leave together, with its batch.

        Returns:
            The last word on each of its unfinished sequences; nothing for an id that is unknown or done.
        """
        ...

    def step(self) -> list[StepOutput]:
        """At most one forward; what happened to whom."""
        ...

    def has_unfinished(self) -> bool:
        """Whether another step would do something."""
        ...

    def sequences(self) -> list[Sequence]:
        """The unfinished sequences, running first, then waiting in queue order."""
        ...
