"""`sixstage roofline`: what the machine could do at best."""

from __future__ import annotations

import json

import typer

from common.cli.options import DEFAULT_MODEL, Dtype, Json, Model, Quick, check_target
from common.files import write_file


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
    import torch  # noqa: PLC0415

    from common.bench.environment import environment  # noqa: PLC0415
    from common.bench.roofline import measure  # noqa: PLC0415
    from common.model.loader import read_config, resolve, resolve_dtype  # noqa: PLC0415

    compute_dtype = resolve_dtype(dtype, torch.device("cpu"))
    config = read_config(resolve(model))
    found = (
        measure(config, compute_dtype, rows=(1, 16), rounds=5) if quick else measure(config, compute_dtype)
    )
    typer.echo(found.to_markdown())
    if json_file is not None:
        figures = {"environment": environment(model=model, dtype=found.dtype), **found.to_json()}
        write_file(json_file, json.dumps(figures, indent=1) + "\n")
