"""`sixstage demo`, `bench` and `roofline`: what each idea is worth, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from common.cli.options import (
    DEFAULT_MODEL,
    Dtype,
    Json,
    KVBytes,
    Model,
    Quick,
    check_folder,
    check_target,
    parse_size,
    spread,
)
from common.stages import find_stage

Stages = Annotated[
    list[str] | None,
    typer.Option("--stage", help="A stage's name or number; may be repeated.", show_default="all of them"),
]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the report goes.")]


def demo(
    stage: Stages = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "float32",
    kv_bytes: KVBytes = "512MiB",
    out: Out = Path("reports"),
    json_file: Json = None,
    quick: Quick = False,
) -> None:
    """Run the same real chat prompts through every stage, side by side.

    Short and long answers are mixed, every stage gets the same KV bytes, and all answers must be identical.
    The report (a page and a Markdown table) is printed and saved: throughput, forwards, tokens computed per
    token emitted, KV memory over time, time to first token.

    \b
    Examples:
      sixstage demo
      sixstage demo --dtype bfloat16    where near ties part, and by how much
      sixstage demo --stage 1 --stage 2 --quick

    Look at: which counter each stage improves. One idea, one cause.
    """
    found = _checked(stage, kv_bytes, json_file, out)
    from common.bench.demo import run  # noqa: PLC0415

    run(model=model, dtype=dtype, quick=quick, **found)


class _Experiments(TyperGroup):
    """A group in which `sixstage bench --quick` means `sixstage bench stages --quick`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default experiment's name in front unless one is named, or help is asked for."""
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["stages", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(name="bench", cls=_Experiments)


@bench.callback()
def _bench() -> None:
    """Measure: stages side by side (the default), or one experiment by name.

    Each run is a fresh process, runs alternate, and medians are reported, because a machine's speed drifts
    over minutes.  The JSON carries environment, commit, model, dtype, KV bytes and a hash of the trace.

    \b
    Examples:
      sixstage bench --quick
      sixstage bench stages --workload sharegpt --json stages.json
      sixstage bench capacity
    """


def stages(
    stage: Stages = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    kv_bytes: KVBytes = "512MiB",
    json_file: Json = None,
    quick: Quick = False,
) -> None:
    """Compare stages on one trace and the same KV bytes: speed, latency, memory, counters.

    \b
    Examples:
      sixstage bench stages --stage 1 --stage 2
      sixstage bench stages --quick --json stages.json

    Look at: output tok/s beside the counters that need no clock (forwards, tokens computed per token).
    """
    found = _checked(stage, kv_bytes, json_file)
    from common.bench.run_stage import bench as run  # noqa: PLC0415

    run(model=model, dtype=dtype, quick=quick, **found)


def capacity(
    stage: Stages = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    kv_bytes: KVBytes = "512MiB",
    out: Out = Path("reports"),
    json_file: Json = None,
    quick: Quick = False,
) -> None:
    """Fill the same KV memory with the same requests: how many are resident, and what the bytes hold.

    \b
    Examples:
      sixstage bench capacity
      sixstage bench capacity --kv-bytes 256MiB --json capacity.json

    Look at: the split into token states, reservation, internal and external fragmentation, and the number
    of requests that were in memory at the same time.
    """
    found = _checked(stage, kv_bytes, json_file, out)
    from common.bench.capacity import run  # noqa: PLC0415

    run(model=model, dtype=dtype, quick=quick, **found)


def roofline(
    model: Model = DEFAULT_MODEL, dtype: Dtype = "auto", json_file: Json = None, quick: Quick = False
) -> None:
    """Measure what this machine could do at best, and how near one forward comes.

    A decode step reads every weight once, so read bandwidth is its floor; a long prompt multiplies, so FLOP/s
    are.  The linear layers alone are timed against a whole forward without attention, at 1 to 64 tokens.

    \b
    Examples:
      sixstage roofline
      sixstage roofline --dtype float32 --json roofline.json

    Look at: how little a forward of 16 tokens costs more than one of a single token. Batching lives on that.
    """
    check_target("--json", json_file)
    from common.bench.roofline import run  # noqa: PLC0415

    run(model=model, dtype=dtype, json=json_file, quick=quick)


for experiment in (stages, capacity):
    bench.command()(spread(experiment))


def _checked(
    stage: list[str] | None, kv_bytes: str, json_file: Path | None, out: Path | None = None
) -> dict[str, Any]:
    """The arguments that all experiments share, judged before the long work."""
    check_target("--json", json_file)
    found: dict[str, Any] = {
        "stages": None if stage is None else [find_stage(name)[0] for name in stage],
        "kv_bytes": parse_size("kv_bytes", kv_bytes),
        "json": json_file,
    }
    if out is not None:
        check_folder("--out", out)
        found["out"] = out
    return found
