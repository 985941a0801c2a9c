"""`sixstage generate`: prompts in, answers out."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.cli.options import EngineOptions, Json, SamplingOptions, check_target, sampling
from common.errors import InvalidValue
from common.files import write_file

if TYPE_CHECKING:
    from common.generate import LLM, Message, Prompt
    from common.output import RequestOutput

Prompts = Annotated[
    list[str], typer.Argument(metavar="PROMPT", help="One or more texts; - reads one from standard input.")
]
AsChat = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]
AsIds = Annotated[bool, typer.Option("--ids", help='Prompts are token ids: "1 504 3575".')]
N = Annotated[int, sampling("--n", help="Answers per prompt.")]
Logprobs = Annotated[
    int | None, sampling(help="Report the chosen token and this many of the likeliest ones (in --json).")
]


def generate(
    prompts: Prompts,
    engine: EngineOptions,
    sampling: SamplingOptions,
    chat: AsChat = False,
    ids: AsIds = False,
    n: N = 1,
    logprobs: Logprobs = None,
    json_file: Json = None,
) -> None:
    """Answer prompts with one stage, and say what that took.

    All prompts go to the engine at once.  Answers are printed on standard output, the counters below them on
    standard error, so that a pipe gets the answers alone.

    \b
    Examples:
      sixstage generate --chat "What is the capital of France?"
      sixstage generate --stage 1 --max-tokens 40 "Once upon a time"
      cat letter.txt | sixstage generate - --json answer.json

    Look at: tokens computed per token emitted, with --stage 1 and with --stage 2. The answers stay the same.
    """
    asked = read_prompts(prompts, chat, ids)
    params = sampling.params(n=n, logprobs=logprobs)
    check_target("--json", json_file)
    llm = engine.load()
    started = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - started
    _print_answers(prompts, outputs)
    _print_counters(llm, outputs, seconds)
    if json_file is not None:
        report = _report(llm, engine, outputs, seconds)
        write_file(json_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def read_prompts(prompts: list[str], chat: bool, ids: bool) -> list[Prompt]:
    """What `LLM.generate` takes, from the words of the command line.

    Raises:
        InvalidValue: an empty prompt, --chat together with --ids, or something that is no token id.
    """
    if chat and ids:
        raise InvalidValue("--ids", True, "no --chat beside it: a chat is made of text")
    read: list[Prompt] = []
    for prompt in prompts:
        text = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
        if not text.strip():
            raise InvalidValue("prompt", text, "a non-empty text")
        if ids:
            read.append(_token_ids(text))
        else:
            messages: list[Message] = [{"role": "user", "content": text}]
            read.append(messages if chat else text)
    return read


def _token_ids(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip(" ,[]"))
    if not all(re.fullmatch(r"-?\d+", word) for word in words):
        raise InvalidValue("prompt", text, "token ids, separated by spaces or commas")
    return [int(word) for word in words]


def _print_answers(prompts: list[str], outputs: list[RequestOutput]) -> None:
    """The answers alone if there is one, each under a heading if there are more."""
    headings = sum(len(output.outputs) for output in outputs) > 1
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        for answer in output.outputs:
            if headings:
                which = f".{answer.index + 1}" if len(output.outputs) > 1 else ""
                first_line = prompt.strip().partition("\n")[0]
                print(f"[{number}{which}] {first_line[:70]}")
            print(answer.text + ("\n" if headings else ""))


def _print_counters(llm: LLM, outputs: list[RequestOutput], seconds: float) -> None:
    from rich.console import Console  # noqa: PLC0415

    stats = llm.engine.stats
    ends = sorted({answer.finish_reason or "" for output in outputs for answer in output.outputs})
    line = (
        f"{llm.stage}: {stats.tokens_emitted} tokens in {seconds:.2f} s "
        f"({stats.tokens_emitted / seconds:.1f} tok/s), {stats.forwards} forwards, "
        f"{stats.computed_per_emitted:.2f} tokens computed per token emitted, ended by: {', '.join(ends)}"
    )
    Console(stderr=True, highlight=False).print(line, style="dim", soft_wrap=True)


def _report(llm: LLM, engine: EngineOptions, outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
    """Everything that was found, ready for JSON."""
    from common.bench.environment import environment  # noqa: PLC0415

    return {
        "environment": environment(
            stage=llm.stage, model=engine.model, dtype=str(llm.model.dtype).removeprefix("torch.")
        ),
        "config": asdict(llm.config),
        "seconds": seconds,
        "stats": asdict(llm.engine.stats),
        "outputs": [asdict(output) for output in outputs],
    }
