"""`sixstage bench profile`: where an engine's time goes."""

from __future__ import annotations

from typing import Annotated

import typer

from common.cli.measure import Experiment, MaxNumSeqs


def profile(
    experiment: Experiment,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(show_default="2048", help="Most tokens in one forward.")
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(metavar="NAMES", show_default="W1,W3,W4,W5", help="Those of 'bench peers'.")
    ] = None,
) -> None:
    """Time the parts of an engine while it serves: linear layers, attention, sampling, scheduling, text.

    \b
    Examples:
      sixstage bench profile
      sixstage bench profile --workloads W5 --max-num-batched-tokens 512
      sixstage bench profile --stage 2 --stage 5 --workloads W4

    Look at: what a step takes outside of the model's forward.
    """
    arguments = experiment.given(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        workloads=None if workloads is None else workloads.split(","),
    )
    from common.bench.profile import run  # noqa: PLC0415

    run(**arguments)
