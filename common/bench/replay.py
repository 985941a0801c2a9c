"""A trace as an engine meets it: its requests, its script of answers, and who comes after whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from common.bench.scripted import ScriptedLengths
from common.bench.workloads import TraceRequest
from common.model.config import ModelConfig
from common.protocol import Executor, Request, StepOutput


class Replay:
    """The requests "0", "1", ... of a trace.

    Args:
        trace: in the order of arrival.
        config: of the model that answers.
        n: answers to each request, all of its trace's length.

    Attributes:
        first: requests that are there from the start; the others come when the one before has ended.
    """

    def __init__(self, trace: Seq[TraceRequest], config: ModelConfig, n: int = 1) -> None:
        self.config = config
        self.lengths = {str(i): item.output_len for i, item in enumerate(trace)}
        self.answers = {str(i): item.answer for i, item in enumerate(trace) if item.answer is not None}
        self.first: list[Request] = []
        self.waiting: dict[str, list[Request]] = defaultdict(list)  # by whose end they wait for
        for i, item in enumerate(trace):
            request = Request(str(i), item.prompt_token_ids, replace(item.params(), n=n))
            (self.first if item.after is None else self.waiting[str(item.after)]).append(request)

    @property
    def tokens(self) -> int:
        """Tokens of all answers, one to each request."""
        return sum(self.lengths.values())

    def script(self, executor: Executor) -> ScriptedLengths:
        """Make the executor answer as the trace says."""
        return ScriptedLengths(executor, self.lengths, self.config, self.answers)

    def follow(self, outputs: Iterable[StepOutput]) -> list[Request]:
        """The requests that come now, since the one before has ended."""
        ended = [out.request_id for out in outputs if out.finish_reason is not None]
        return [request for request_id in ended for request in self.waiting.pop(request_id, ())]
