"""The report of `sixstage bench`: speed with its spread, waiting times, counters and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.demo_report import memory_table, speed_picture
from common.bench.environment import describe
from common.bench.report import Report, Section, Table, human_bytes
from common.bench.report_multiples import multiples

SPEED = (
    "Medians over runs, each in a fresh process; range is the slowest and the fastest run. Output "
    "tokens are those of the answers; total tokens count the prompts too."
)
WAITING = (
    "TTFT is the time from a request's arrival (all at the start) to its first token; TPOT the time per "
    "further token of its answer."
)
STEPS = "The table has medians; what is stepped through is the first run of each stage, from its beginning."
MEMORY = (
    "Reserved is memory that nobody else can use; live is memory that holds a token of an unfinished request."
)


def bench_report(results: Mapping[str, Any]) -> Report:
    """Put what `common.bench.run_stage.collect` returns into a report."""
    stages, env = results["stages"], results["environment"]
    steps = results.get("events", {})  # an older file has none
    medians = {name: stage["median"] for name, stage in stages.items()}
    spread = {name: (s["min"]["output_tok_s"], s["max"]["output_tok_s"]) for name, s in stages.items()}
    sections = [
        Section("Speed", (SPEED,), _speed(stages), (speed_picture(medians, spread),)),
        Section("Waiting", (WAITING,), _waiting(medians)),
        Section("Work and places", (STEPS,) if steps else (), _work(medians), runs=steps),
        Section("KV memory", (MEMORY,), memory_table(medians)),
    ]
    count = len(next(iter(stages.values()))["runs"])
    lead = (
        f"{env['num_requests']} requests of workload '{env['workload']}', {human_bytes(env['kv_bytes'])} "
        f"of KV memory, {env['dtype']}, {count} {'run' if count == 1 else 'runs'} of each stage."
    )
    footer = (
        f"{env['model']}, at most {env['max_num_seqs']} sequences in a batch, context "
        f"{env['max_model_len']}, block size {env['block_size']}, reservation {env['reservation']}, "
        f"kernel {env['kernel']}. "
        f"{describe(env)}. Trace sha256 {results['trace_hash'][:16]}."
    )
    about = f"{env['num_requests']} requests, {human_bytes(env['kv_bytes'])} of KV memory, {env['dtype']}."
    overview = (multiples(f"Workload {env['workload']}", about, stages),)
    return Report("Stages side by side", lead, sections, footer, dict(results), overview)


def _speed(stages: Mapping[str, Any]) -> Table:
    names = list(stages)
    speed = {name: stages[name]["median"]["output_tok_s"] for name in names}
    rows = []
    for row, name in enumerate(names):
        low, high = (stages[name][which]["output_tok_s"] for which in ("min", "max"))
        rows.append([
            name,
            f"{speed[name]:.1f}",
            f"{low:.1f}..{high:.1f}",
            f"{stages[name]['median']['total_tok_s']:.1f}",
            f"{speed[name] / speed[names[row - 1]]:.2f}x" if row else "",
            f"{speed[name] / speed[names[0]]:.2f}x" if row else "",
            human_bytes(stages[name]["median"]["peak_memory_bytes"] or 0),
        ])  # fmt: skip
    columns = ("stage", "output tok/s", "range", "total tok/s", "vs stage before", "vs first stage",
               "process memory")  # fmt: skip
    return Table(columns, rows)


def _waiting(medians: Mapping[str, Any]) -> Table:
    quantiles = ("p50", "p95", "p99")
    rows = [
        [
            name,
            *(f"{figures['ttft_s'][q]:.2f} s" for q in quantiles),
            *(f"{1e3 * figures['tpot_s'].get(q, 0.0):.1f} ms" for q in quantiles),
        ]
        for name, figures in medians.items()
    ]
    return Table(("stage", *(f"TTFT {q}" for q in quantiles), *(f"TPOT {q}" for q in quantiles)), rows)


def _work(medians: Mapping[str, Any]) -> Table:
    rows = [
        [
            name,
            f"{figures['counters']['forwards']:,.0f}",
            f"{figures['computed_per_emitted']:.1f}",
            f"{figures['running']['peak']:.0f}",
            f"{figures['running']['mean']:.1f}",
            f"{figures['occupancy']:.0%}",
            f"{figures['counters']['preemptions']:.0f}",
        ]
        for name, figures in medians.items()
    ]
    columns = ("stage", "forwards", "computed per token", "running, peak", "running, mean", "places busy",
               "preemptions")  # fmt: skip
    return Table(columns, rows)
