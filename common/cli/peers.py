"""`sixstage bench peers`: the stages beside other engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from common.cli.options import (
    DEFAULT_MODEL,
    Dtype,
    Json,
    Model,
    Quick,
    check_folder,
    check_target,
    option,
    parse_size,
)

RUNS = "Runs"


@dataclass(frozen=True)
class SettingsOptions:
    """How much is done, and with what; see `common.bench.peers.command.Settings`."""

    kv_bytes: Annotated[str, option(panel=RUNS, metavar="SIZE", help="K/V memory of each engine.")] = "2GiB"
    max_num_seqs: Annotated[int, option(panel=RUNS, help="Most sequences in one batch.")] = 64
    warm: Annotated[int, option(panel=RUNS, help="Runs of warming up in each process.")] = 2
    runs: Annotated[int, option(panel=RUNS, help="Measured runs, each in a process of its own.")] = 3
    limit: Annotated[
        float,
        option(panel=RUNS, metavar="SECONDS", help="A run that takes longer is cut off, and not repeated."),
    ] = 120.0
    quick: Quick = False


def peers(
    settings: SettingsOptions,
    peer: Annotated[
        str | None,
        option(
            "--peers",
            panel="Who",
            metavar="NAMES",
            show_default="all",
            help="Names with commas between, or 'none'; a wrong name lists those there are.",
        ),
    ] = None,
    stage: Annotated[
        list[str] | None,
        option(
            "--stage",
            panel="Who",
            show_default="all of them",
            help="A stage's name or number, 6 is the server; may be repeated.",
        ),
    ] = None,
    workloads: Annotated[
        str | None,
        option("--workloads", panel="What", metavar="NAMES", show_default="W1 to W5", help="Such as W1,W3."),
    ] = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the report goes.")] = Path("reports"),
    json_file: Json = None,
) -> None:
    """Put the stages beside other engines: vLLM, OpenVINO GenAI, llama.cpp, transformers.

    The same model, token ids, answer lengths and cores for everybody; each run is a process of its own, in
    alternating order. A peer's packages go into an environment of its own in the user's cache (gigabytes, and
    minutes, the first time); a peer that cannot be had is reported as missing.

    \b
    Examples:
      sixstage bench peers --peers vllm,openvino --workloads W3,W4
      sixstage bench peers --quick --peers transformers-batching
      sixstage bench peers --dtype float32 --stage 4 --stage 5

    Look at: who is ahead where, and by how much more than the runs differ among themselves.
    """  # fmt: skip
    check_target("--json", json_file)
    check_folder("--out", out)
    given = {**vars(settings), "kv_bytes": parse_size("kv_bytes", settings.kv_bytes)}
    from common.bench.peers.command import Settings, run  # noqa: PLC0415

    if settings.quick:
        given |= {"warm": min(settings.warm, 1), "runs": 1}
    run(stage, names(peer), names(workloads), model, dtype, Settings(**given), json_file, out)


def names(text: str | None) -> list[str] | None:
    """What "a, b" lists; nothing for "none", and None stays None."""
    if text is None:
        return None
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
