"""The engine in a thread of its own, so that the event loop never waits for a forward.

    event loop                                 engine thread
    submit(requests) -> Job   --- inbox -->    add_request, abort      (between two steps)
    Job.updates()             <-- post ---     step, detokenize, stop strings

The inbox is the only way in and `loop.call_soon_threadsafe` the only way out, once per step for everybody.  All
books that both sides would need (how many requests there are) are kept on the loop alone, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Protocol, TypeAlias

from common.errors import BadLogits, InvalidValue
from common.output import OutputProcessor, RequestOutput
from common.protocol import Engine, Request, StepOutput
from common.tokenizer import Tokenizer
from stage6_api.errors import ApiError, engine_failed, invalid_value, overloaded
from stage6_api.job import Job

log = logging.getLogger("sixstage.engine")


class Observer(Protocol):
    """Whoever counts; called in the engine thread."""

    def added(self, request: Request, arrived: float) -> None:
        """A request reached the engine; it arrived at the server at this time (`time.monotonic`)."""

    def stepped(self, started: float, engine: Engine, outputs: list[StepOutput]) -> None:
        """A step that began at this time is over."""

    def finished(self, output: RequestOutput) -> None:
        """A request has ended by itself or by a stop string."""

    def aborted(self, request_id: str) -> None:
        """A request was taken back, or has failed."""

    def settled(self, engine: Engine) -> None:
        """Everything that came in has been booked; what the engine holds now is what gauges should show."""


@dataclass(frozen=True)
class Limits:
    """How much may wait.  None is no limit; both count what runs too, and `n` counts n times (vLLM's names)."""

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None  # prompt tokens whose answer has not begun


@dataclass(frozen=True)
class _Add:
    request: Request
    prompt: str | None
    stream: bool
    arrived: float


@dataclass(frozen=True)
class _Abort:
    request_id: str


_Command: TypeAlias = "_Add | _Abort | Callable[[], None] | None"  # None: end the thread


class AsyncEngine:
    """`submit` and `release` on the event loop; everything else happens in the thread.

    Attributes:
        failure: what ended the engine, if something did.
        draining: whether new requests are refused because the server is about to end.
        between_steps: called in the thread whenever a step may come next, by who looks on (`live_view.py`);
            True holds that step back until it is asked again.  To be set in the thread, see `call`.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, observer: Observer, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.failure: BaseException | None = None
        self.draining = False
        self.between_steps: Callable[[Engine], bool] | None = None
        self._observer = observer
        self._processor = OutputProcessor(tokenizer)
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._jobs: dict[str, tuple[Job, int]] = {}  # request id -> its job and its number in it
        self._unbegun: dict[str, int] = {}  # request id -> prompt tokens, until its first token
        self._num_live = 0  # answers: n of each live request
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    # The event loop's side.

    def start(self) -> None:
        """Start the thread; to be called on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_live_jobs(self) -> int:
        """HTTP calls that the engine is working for."""
        return len({id(job) for job, _ in self._jobs.values()})

    def check_ready(self) -> None:
        """Raise ApiError unless a new request would be taken."""
        if self.failure is not None:
            raise engine_failed("The engine has failed; the server is ending.")
        if self.draining:
            raise overloaded("The server is shutting down.", retry_after=5)

    def submit(self, requests: Seq[Request], prompts: Seq[str | None], stream: bool) -> Job:
        """Let all of the requests in, or none.

        Args:
            requests: with ids that are unique in this process.
            prompts: their texts, where they came as text.
            stream: report after every step; else once, at the end.

        Raises:
            ApiError: the queue is full, the server is ending, or the engine is dead.
            InvalidValue: a request that could never be served.
        """
        self.check_ready()
        for request in requests:
            self.engine.kv.check_fits(request)
        self._check_room(requests)
        job = Job(requests)
        for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            self._jobs[request.request_id] = job, number
            self._unbegun[request.request_id] = len(request.prompt_token_ids)
            self._num_live += request.params.n
            self._inbox.put(_Add(request, prompt, stream, job.arrived))
        return job

    def release(self, job: Job) -> None:
        """The HTTP call is over, whatever the reason: take back what has not ended."""
        for request in job.requests:
            if self._strike_off(request.request_id):
                self._inbox.put(_Abort(request.request_id))

    def call(self, function: Callable[[], None]) -> None:
        """Let the thread call a function before its next step."""
        self._inbox.put(function)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give those that run so much time, and fail the rest."""
        self.draining = True
        end = monotonic() + seconds
        while self._jobs and monotonic() < end:
            await asyncio.sleep(0.02)
        self.fail_all(overloaded("The server is shutting down.", retry_after=5))

    def fail_all(self, error: ApiError) -> None:
        """Tell everyone who waits, and take their requests back."""
        for job in {id(job): job for job, _ in self._jobs.values()}.values():
            job.fail(error)
            self.release(job)

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._inbox.put(None)
        self._thread.join(timeout=10)

    def _check_room(self, requests: Seq[Request]) -> None:
        limits = self.limits
        asked = sum(request.params.n for request in requests)
        if limits.max_num_queued_reqs is not None and self._num_live + asked > limits.max_num_queued_reqs:
            raise overloaded(f"The queue is full: {self._num_live} of {limits.max_num_queued_reqs} requests.")
        tokens = sum(len(request.prompt_token_ids) for request in requests)
        waiting = sum(self._unbegun.values())
        if limits.max_num_queued_tokens is not None and waiting + tokens > limits.max_num_queued_tokens:
            raise overloaded(f"The queue is full: {waiting} of {limits.max_num_queued_tokens} prompt tokens.")

    def _strike_off(self, request_id: str) -> bool:
        """Take a request out of the books; False if it was not in them any more."""
        job, number = self._jobs.pop(request_id, (None, 0))
        self._unbegun.pop(request_id, None)
        if job is None:
            return False
        self._num_live -= job.requests[number].params.n
        return True

    def _deliver(self, outputs: Iterable[RequestOutput], begun: Iterable[str]) -> None:
        """Hand out what a step brought."""
        for request_id in begun:
            if request_id in self._jobs:
                self._unbegun.pop(request_id, None)
                job = self._jobs[request_id][0]
                job.first_token_at = job.first_token_at or monotonic()
        for output in outputs:
            if output.request_id in self._jobs:  # else its client has left meanwhile
                job, number = self._jobs[output.request_id]
                job.put(number, output)
                if output.finished:
                    self._strike_off(output.request_id)

    def _fail_one(self, request_id: str, error: ApiError) -> None:
        if request_id in self._jobs:
            job = self._jobs[request_id][0]
            job.fail(error)
            self.release(job)

    # The engine thread's side.

    def _run(self) -> None:
        try:
            held = False
            while self._take_in():
                if self.engine.has_unfinished() and not held:
                    self._step()
                held = self.between_steps is not None and self.between_steps(self.engine)
        except BaseException as error:
            log.exception("the engine has failed")
            self.failure = error
            self._post(self.fail_all, engine_failed())

    def _take_in(self) -> bool:
        """Book everything that has come in, waiting for something if there is nothing to do; False ends."""
        wait = not self.engine.has_unfinished()
        if wait:
            self._observer.settled(self.engine)
        try:
            while True:
                command = self._inbox.get(block=wait)
                if command is None:
                    return False
                self._obey(command)
                wait = False
        except Empty:
            self._observer.settled(self.engine)
            return True

    def _obey(self, command: _Add | _Abort | Callable[[], None]) -> None:
        if isinstance(command, _Abort):
            self._abort(command.request_id)
            return
        if not isinstance(command, _Add):
            command()
            return
        request = command.request
        try:
            self._processor.add(request, command.prompt, command.stream)
            self.engine.add_request(request)
        except InvalidValue as error:
            self._processor.abort(request.request_id)
            self._post(self._fail_one, request.request_id, invalid_value(error))
        else:
            self._observer.added(request, command.arrived)

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        if self._processor.abort(request_id) is not None:
            self._observer.aborted(request_id)

    def _step(self) -> None:
        started = monotonic()
        try:
            outputs = self.engine.step()
        except BadLogits as error:
            # Nothing was booked, so the others simply take this step again.
            log.error("%s", error)
            self._abort(error.request_id)
            self._post(self._fail_one, error.request_id, engine_failed())
            return
        changed, stopped = self._processor.process(outputs)
        for request_id, index in stopped:
            self.engine.abort(request_id, index)
        self._observer.stepped(started, self.engine, outputs)
        for output in changed:
            if output.finished:
                self._observer.finished(output)
        begun = [out.request_id for out in outputs if out.counters.output_tokens == 1]
        if changed or begun:
            self._post(self._deliver, changed, begun)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)
