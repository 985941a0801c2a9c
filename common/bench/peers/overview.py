"""The comparison as small multiples: a group per workload, a panel per figure, a bar per engine."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from common.bench.report_multiples import Group, multiples
from common.bench.run_stage import merge


def overview(results: Mapping[str, Any]) -> list[Group]:
    """Of what `common.bench.peers.command.run` returns; who was cut off or failed has no bar."""
    groups = []
    for workload, about in results["workloads"].items():
        cells = results["cells"][workload]
        engines = {
            name: {
                which: merge([_figures(run) for run in cell["runs"]], how)
                for which, how in (("median", median), ("min", min), ("max", max))
            }
            for name, cell in cells.items()
            if "median" in cell
        }
        groups.append(multiples(f"Workload {workload}", about["about"], engines))
    return groups


def _figures(run: Mapping[str, Any]) -> dict[str, Any]:
    """One run's, under the names of `common.bench.metrics.summarise`; one token has none after it."""
    found: dict[str, Any] = {"output_tok_s": run["output_tok_s"], "ttft_s": {"p50": run["ttft_s"]}}
    return found | ({"tpot_s": {"p50": run["token_ms"] / 1e3}} if run["token_ms"] else {})
