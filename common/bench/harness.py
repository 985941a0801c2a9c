"""Steps that every measured run shares: pick stages, build an engine, warm it up, show progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from common.bench.record import Recorder, Run
from common.config import EngineConfig
from common.errors import InvalidValue
from common.generate import drive
from common.protocol import Engine, Executor, Model, Request, StepOutput
from common.sampling_params import SamplingParams
from common.stages import STAGES, find_stage


def new_console() -> Console:
    """The terminal; where there is none (a pipe, a log file), wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def pick_stages(stages: Iterable[str | int] | None) -> list[str]:
    """Names of the stages asked for, in the registry's order; None is all of them.

    Raises:
        InvalidValue: there is no such stage, or none was named.
    """
    if stages is None:
        return list(STAGES)
    wanted = {find_stage(stage)[0] for stage in stages}
    if not wanted:
        raise InvalidValue("stages", [], "at least one of " + ", ".join(STAGES))
    return [name for name in STAGES if name in wanted]


def run_stage(
    stage: str,
    model: Model,
    config: EngineConfig,
    requests: Seq[Request],
    *,
    on_step: Callable[[list[StepOutput]], None] | None = None,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
    memory_every: int = 1,
    arrivals: Seq[float] | None = None,
    follow: Callable[[list[StepOutput]], Iterable[Request]] = lambda outputs: (),
    warm: bool = True,
) -> Run:
    """Serve the requests with a fresh engine of this stage and record it.

    Args:
        stage: a name from the registry.
        model: loaded once, shared by the stages.
        config: the engine's.
        requests: in order of arrival.
        on_step: told what each step brought.
        wrap: puts something around the engine's executor (a script of lengths), or in its place.
        memory_every: see `Recorder`.
        arrivals: see `Recorder.run`.
        follow: see `Recorder.run`.
        warm: first let another engine of the stage answer something short, so that what happens only once
            in a process (compilation, packing of weights) is not timed.
    """
    make = find_stage(stage)[1].resolve()
    if warm:
        _warm_up(make(model, config))
    engine = make(model, config)
    engine.executor = wrap(engine.executor)
    return Recorder(engine, memory_every).run(requests, on_step, arrivals, follow)


def progress(console: Console) -> Progress:
    """A bar for long work, with what is done and how long it has taken."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _warm_up(engine: Engine) -> None:
    """A short prompt, and one of so many tokens that the kernels for many rows are compiled, too."""
    token, num_answer = engine.model.config.vocab_size // 2, 4
    params = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
    room = min(engine.config.max_model_len, engine.kv.max_len) - num_answer
    requests = [Request(f"warm-up {length}", (token,) * min(length, room), params) for length in (9, 128)]
    for _ in drive(engine, requests):
        pass
