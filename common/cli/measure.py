"""`sixstage demo` and `bench`: what each idea is worth, measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from common.cli.options import (
    DEFAULT_MODEL,
    Json,
    Quick,
    check_folder,
    check_target,
    parse_size,
    spread,
)
from common.cli.peers import peers
from common.stages import find_stage

OWN = "the experiment's own"
MaxNumSeqs = Annotated[int | None, typer.Option(show_default=OWN, help="Most sequences in one batch.")]


@dataclass(frozen=True)
class Experiment:
    """What all experiments take.  None leaves it to the experiment, which has defaults of its own."""

    stage: Annotated[
        list[str] | None,
        typer.Option(show_default="all of them", help="A stage's name or number; may be repeated."),
    ] = None
    model: Annotated[str, typer.Option(help="Built-in name, local folder, GGUF file or hub id.")] = (
        DEFAULT_MODEL
    )
    dtype: Annotated[
        str | None, typer.Option(show_default=OWN, help="auto, bfloat16, float16 or float32.")
    ] = None
    kv_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", show_default=OWN, help="K/V memory of each stage: 512MiB, 1GiB, bytes."),
    ] = None
    kernel: Annotated[
        str | None,
        typer.Option(show_default=OWN, help="Paged attention: auto, reference, triton or cpu."),
    ] = None
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the report goes.")] = Path("reports")
    json_file: Json = None
    quick: Quick = False

    def given(self, **more: Any) -> dict[str, Any]:
        """The experiment's arguments, judged before the long work; `more` are those of its own.

        Raises:
            InvalidValue: a stage, size or file that cannot be used.
        """
        check_target("--json", self.json_file)
        check_folder("--out", self.out)
        arguments = {
            "stages": None if self.stage is None else [find_stage(name)[0] for name in self.stage],
            "model": self.model,
            "dtype": self.dtype,
            "kv_bytes": None if self.kv_bytes is None else parse_size("kv_bytes", self.kv_bytes),
            "kernel": self.kernel,
            "out": self.out,
            "json": self.json_file,
            "quick": self.quick,
            **more,
        }
        return {name: value for name, value in arguments.items() if value is not None}


def demo(experiment: Experiment, max_num_seqs: MaxNumSeqs = None) -> None:
    """Run the same real chat prompts through every stage, side by side.

    Short and long answers are mixed, every stage gets the same KV bytes, and all answers must be identical.
    The report (a page and a Markdown table) is printed and saved: throughput, forwards, tokens computed per
    token emitted, KV memory over time, time to first token. It computes in float32 unless told otherwise.

    \b
    Examples:
      sixstage demo
      sixstage demo --dtype bfloat16    where near ties part, and by how much
      sixstage demo --stage 1 --stage 2 --quick

    Look at: which counter each stage improves. One idea, one cause.
    """
    arguments = experiment.given(max_num_seqs=max_num_seqs)
    from common.bench.demo import run  # noqa: PLC0415

    run(**arguments)


class _Experiments(TyperGroup):
    """A group in which `sixstage bench --quick` means `sixstage bench stages --quick`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default experiment's name in front unless one is named, or help is asked for."""
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["stages", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(name="bench", cls=_Experiments)


def _bench() -> None:
    """Measure: stages side by side (the default), or one experiment by name.

    Without a name it is `stages`. Each experiment explains itself: `sixstage bench capacity --help`.

    \b
    Examples:
      sixstage bench --quick
      sixstage bench stages --workload uniform --json stages.json
      sixstage bench capacity
    """


def stages(
    experiment: Experiment,
    max_num_seqs: MaxNumSeqs = None,
    workload: Annotated[
        str | None, typer.Option(show_default="sharegpt", help="Which trace: prompt and answer lengths.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(show_default=OWN, help="Requests of the trace.")] = None,
    runs: Annotated[int | None, typer.Option(show_default=OWN, help="Runs of each stage.")] = None,
    block_size: Annotated[
        int | None, typer.Option(show_default="16", help="Tokens per KV block (stage 3 on).")
    ] = None,
    reservation: Annotated[
        str | None,
        typer.Option(show_default="max_tokens", help="Stage 2 reserves max_tokens or max_model_len."),
    ] = None,
) -> None:
    """Compare stages on one trace and the same KV bytes: speed, latency, memory, counters.

    Each run is a fresh process, runs alternate, and medians are reported, because a machine's speed drifts
    over minutes. The JSON carries environment, commit, model, dtype, KV bytes and a hash of the trace.

    \b
    Examples:
      sixstage bench stages --stage 1 --stage 2
      sixstage bench stages --workload uniform --quick --json stages.json

    Look at: output tok/s beside the counters that need no clock (forwards, tokens computed per token).
    """
    arguments = experiment.given(
        max_num_seqs=max_num_seqs,
        workload=workload,
        num_requests=num_requests,
        runs=runs,
        block_size=block_size,
        reservation=reservation,
    )
    from common.bench.run_stage import bench as run  # noqa: PLC0415

    run(**arguments)


def step(experiment: Experiment) -> None:
    """Take a step apart: how its time grows with the text, where it goes, and what the machine could do.

    \b
    Examples:
      sixstage bench step
      sixstage bench step --stage 4 --stage 5

    Look at: the time of the next token in stage 1, before and after a long text.
    """
    arguments = experiment.given()
    from common.bench.step import run  # noqa: PLC0415

    run(**arguments)


def cache(experiment: Experiment, max_num_seqs: MaxNumSeqs = None) -> None:
    """Remember K/V, or do not: what a cache is worth, and what its contiguous reservations cost.

    \b
    Examples:
      sixstage bench cache
      sixstage bench cache --quick --json cache.json

    Look at: tokens computed for each token of an answer, with and without a cache.
    """
    arguments = experiment.given(max_num_seqs=max_num_seqs)
    from common.bench.cache import run  # noqa: PLC0415

    run(**arguments)


def capacity(experiment: Experiment) -> None:
    """Fill the same KV memory with the same requests: how many are resident, and what the bytes hold.

    \b
    Examples:
      sixstage bench capacity
      sixstage bench capacity --kv-bytes 256MiB --json capacity.json

    Look at: the split into token states, reservation, internal and external fragmentation, and the number of
    requests that were in memory at the same time.
    """
    arguments = experiment.given()
    from common.bench.capacity import run  # noqa: PLC0415

    run(**arguments)


def batching(experiment: Experiment, max_num_seqs: MaxNumSeqs = None) -> None:
    """Serve requests whose answers differ in length: what waiting for the slowest of a batch costs.

    \b
    Examples:
      sixstage bench batching
      sixstage bench batching --quick --json batching.json

    Look at: the places of a batch in which nothing was computed, with and without continuous batching.
    """
    arguments = experiment.given(max_num_seqs=max_num_seqs)
    from common.bench.batching import run  # noqa: PLC0415

    run(**arguments)


def sharing(experiment: Experiment, max_num_seqs: MaxNumSeqs = None) -> None:
    """Serve agents and chats whose prompts begin alike: what holding equal blocks once is worth.

    Also: what parallel samples and beams share, beam search in two ways, and the price of hashing where no two
    prompts are alike.

    \b
    Examples:
      sixstage bench sharing
      sixstage bench sharing --quick --json sharing.json

    Look at: prompt tokens computed, and the first token of a request whose beginning has been sent before.
    """
    arguments = experiment.given(max_num_seqs=max_num_seqs)
    from common.bench.sharing import run  # noqa: PLC0415

    run(**arguments)


def serve(experiment: Experiment, max_num_seqs: MaxNumSeqs = None) -> None:
    """Serve each stage over HTTP to users who come at random: what they feel, and what the server costs.

    Server and client are processes of their own. Also: the same requests without a server, and twenty agents
    that share a system prompt.

    \b
    Examples:
      sixstage bench serve
      sixstage bench serve --stage 3 --stage 5 --json serve.json

    Look at: the rate at which a stage's latency turns up. Below it, all stages feel alike.
    """
    arguments = experiment.given(max_num_seqs=max_num_seqs)
    from common.bench.serve import run  # noqa: PLC0415

    run(**arguments)


bench.callback()(spread(_bench))
for command in (stages, step, cache, capacity, batching, sharing, serve, peers):
    bench.command()(spread(command))
