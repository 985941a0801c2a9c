"""`sixstage chat`: a conversation in the terminal, text shown as it is made."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from common.cli.options import EngineOptions, SamplingOptions
from common.errors import InvalidValue

if TYPE_CHECKING:
    from rich.console import Console

    from common.generate import LLM, Message
    from common.output import RequestOutput
    from common.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"
COMMANDS = ("/reset", "/quit", "/help")

System = Annotated[
    str | None, typer.Option(show_default="the chat template's own", help="What the model is told to be.")
]
ReadLine = Callable[[], str]
"""Next line of the user; raises EOFError at the end and KeyboardInterrupt on Ctrl-C, as `input` does."""


def chat(engine: EngineOptions, sampling: SamplingOptions, system: System = None) -> None:
    """Talk to the model through one stage's engine.

    The whole conversation is sent with every turn.  Below each answer stand its tokens, its speed and the
    time to its first token.  /reset forgets the conversation, /quit or Ctrl-D ends the program, Ctrl-C stops
    an answer and nothing else.

    \b
    Examples:
      sixstage chat
      sixstage chat --stage 1
      sixstage chat --temperature 0.7 --top-p 0.9 --system "You answer in one sentence."

    Look at: how stage 1 gets slower with every token, and waits longer for the first one at every turn.
    """
    params = sampling.params()
    if system is not None and not system.strip():
        raise InvalidValue("--system", system, "a non-empty text")
    llm = engine.load()
    from rich.console import Console  # noqa: PLC0415

    console = Console(highlight=False)
    dtype = str(llm.model.dtype).removeprefix("torch.")
    _note(console, f"{engine.model} ({dtype}) on {llm.stage}. {HELP}.")
    converse(llm, params, _reader(), console, system)


def converse(
    llm: LLM, params: SamplingParams, read_line: ReadLine, console: Console, system: str | None = None
) -> None:
    """Read, answer, remember, until the user ends it.

    A turn that cannot be served (the conversation has outgrown the context, say) is reported and forgotten;
    an answer that was stopped half-way is remembered as far as it came.
    """
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while True:
        try:
            text = read_line().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _note(console, f"\n{HELP}.")
            continue
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(opening)
            _note(console, "The conversation is forgotten.")
        elif text.startswith("/"):
            known = ", ".join(COMMANDS)
            _note(
                console,
                f"{HELP}." if text == "/help" else f"{text.split()[0]}: no such command, there are {known}.",
            )
        elif text:
            question: Message = {"role": "user", "content": text}
            try:
                reply = answer(llm, [*messages, question], params, console)
            except InvalidValue as error:
                _note(console, f"{error}. This turn is forgotten; /reset makes room.", "red")
                continue
            messages += [question, {"role": "assistant", "content": reply}]


def answer(llm: LLM, messages: list[Message], params: SamplingParams, console: Console) -> str:
    """Show one answer as it is made, and its counters; return its text."""
    started = time.perf_counter()
    first, text, last = None, "", None
    with _interruptible() as stop, closing(llm.stream(messages, params)) as outputs:
        for last in outputs:
            first = first or time.perf_counter()
            console.out(last.outputs[0].delta, end="", highlight=False)
            text = last.outputs[0].text
            if stop.is_set():
                break
    console.out()
    if last is not None and first is not None:
        timing = Timing(first - started, time.perf_counter() - first)
        _note(console, counters(last, timing, llm.config.max_model_len))
    return text


@dataclass(frozen=True)
class Timing:
    """Seconds from the question to the first token, and from there to the last."""

    to_first: float
    after_first: float


def counters(output: RequestOutput, timing: Timing, max_model_len: int) -> str:
    """The line below an answer."""
    [completion] = output.outputs
    tokens = len(completion.token_ids)
    context = len(output.prompt_token_ids) + tokens
    parts = [f"{tokens} tokens"]
    if tokens > 1 and timing.after_first > 0:
        parts.append(f"{(tokens - 1) / timing.after_first:.1f} tok/s")
    parts += [f"first after {timing.to_first:.2f} s", f"context {context} of {max_model_len}"]
    if completion.finish_reason is None:
        parts.append("stopped")
    elif completion.finish_reason == "length":
        parts.append("the context is full: /reset" if context >= max_model_len else "cut at --max-tokens")
    return " · ".join(parts)


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Turn the first Ctrl-C into a flag that is looked at between two steps; a second one is not held back.

    An interrupt in the middle of a step could leave the engine's books half-written.
    """
    stop = Event()

    def on_interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _reader() -> ReadLine:
    """`input` with line editing and a prompt on a terminal; plain lines from a pipe."""
    if not sys.stdin.isatty():
        return input
    with suppress(ImportError):  # Windows has line editing of its own
        import_module("readline")  # from now on `input` has line editing and history
    return lambda: input("> ")


def _note(console: Console, line: str, style: str = "dim") -> None:
    console.print(line, style=style, markup=False)
