"""`sixstage report`: the page once more, from the JSON files that `demo` and `bench` wrote, here or elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from common.bench.batching_report import batching_report
from common.bench.beam_picture import beam_picture
from common.bench.bench_report import bench_report
from common.bench.cache_report import cache_report
from common.bench.capacity_report import capacity_report
from common.bench.demo_report import demo_report
from common.bench.peers.report import peers_report
from common.bench.profile_report import profile_report
from common.bench.report import Report
from common.bench.report_page import to_html
from common.bench.serve_report import serve_report
from common.bench.sharing_pictures import copy_picture, tree_picture
from common.bench.sharing_report import sharing_report
from common.bench.step_report import step_report
from common.errors import InvalidValue
from common.files import write_file
from common.model.loader import read_config, resolve

ANY_MODEL = "tiny-llama"  # the pictures of stage 5 hold words of a script, whatever the model


def make_page(paths: Seq[Path], out: Path) -> None:
    """Write one page of these files, in this order.

    Raises:
        InvalidValue: no file was named, or one cannot be read or holds something else.
        SixstageError: the page cannot be written.
    """
    if not paths:
        raise InvalidValue("files", [], "at least one JSON file of 'sixstage demo' or 'sixstage bench'")
    write_file(out, to_html([read_report(path) for path in paths]))


def read_report(path: Path) -> Report:
    """The report that was made with this file.

    Raises:
        InvalidValue: it cannot be read, is of no kind that is known, or lacks what its kind needs.
    """
    known = "JSON written by 'sixstage demo' or 'sixstage bench'"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InvalidValue("file", str(path), f"{known} ({error})") from error
    for mark, make in KINDS.items():
        if isinstance(results, dict) and mark in results:
            try:
                return make(results)
            except (LookupError, TypeError, AttributeError, ValueError, StopIteration) as error:
                raise InvalidValue("file", str(path), f"{known}; at {mark!r}: {error!r}") from error
    raise InvalidValue("file", str(path), known)


def _sharing(results: Mapping[str, Any]) -> Report:
    """Two pictures are of runs without a model, made once more; a file without a recorded search has no third."""
    stage, config = results["environment"]["stage"][-1], read_config(resolve(ANY_MODEL))
    tree, copy = (draw(stage, config, torch.float32) for draw in (tree_picture, copy_picture))
    beams = beam_picture(stage, results["beam_tree"]) if "beam_tree" in results else None
    return sharing_report(results, tree, copy, beams)


KINDS: Mapping[str, Callable[[Mapping[str, Any]], Report]] = {
    "chats": demo_report,
    "at_once": batching_report,
    "block_sizes": capacity_report,
    "hashing": _sharing,
    "cells": peers_report,
    "curves": serve_report,
    "by_length": step_report,
    "moment": cache_report,
    "cases": profile_report,
    "stages": bench_report,
}
"""What only such a file has at its top -> how its report is made; the first that fits is taken."""
