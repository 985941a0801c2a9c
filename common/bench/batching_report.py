"""The report of `sixstage bench batching`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.record import Run
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.bench.report_multiples import Group, multiples
from common.course.pictures import budget_curve, slot_timeline

AT_ONCE = (
    "All requests are there from the start. A static batch lasts as long as its longest answer; places whose "
    "answer has ended stay idle until then. Occupancy is the share of places that computed something, over the "
    "forwards during which requests waited: without a queue nobody could have taken the place. Stage 1, where it "
    "takes part, serves only the first requests, and these cut short, which is a favour to it."
)
ARRIVING = (
    "{requests} requests come at {rate:.2f} per second, {load} of what the continuous stage serves when all are "
    "there at once. TTFT counts from the arrival, queueing included; TPOT is the time per further token."
)
TIMELINE = (
    "Seven requests, three places, the same answers. Left to right are forwards. Where A ends, the static batch "
    "leaves its place idle until the slowest member is done; the continuous one gives it to the next in the queue "
    "in the very next forward."
)
BUDGET = (
    "Eight users are being answered when somebody sends a prompt of {prompt} tokens. With a large budget the "
    "prompt is computed in one forward and everyone waits for it; with a small one it comes in chunks beside "
    "their tokens, and its own first token comes later."
)
LOSES = (
    "A budget below the knee costs the long prompt more than it gives the others: every chunk is a forward that "
    "reads all weights again. At low load there is nothing to gain: a lone request runs alone in any stage. And where "
    "arithmetic sets the time of a step, not memory (a CPU, from about ten rows on), an idle place saves time too, so "
    "filling it gains less than the forwards that it saves."
)
NAMES = {"at_once": "All at once", "poisson": "Poisson arrivals", "burst": "Bursts of eight"}


def batching_report(results: Mapping[str, Any], timelines: Mapping[str, Run] | None = None) -> Report:
    """Put what `common.bench.batching.run` returns into a report.

    Args:
        results: a file's may lack `events`, and have nothing to step through.
        timelines: stage -> its record, for the pictures beside the Markdown; the page draws `events`.
    """
    env, timelines = results["environment"], timelines or {}
    sections = [Section(NAMES["at_once"], (AT_ONCE,), _speed(results["at_once"]["stages"]))]
    for kind in ("poisson", "burst"):
        text = ARRIVING.format(
            requests=results[kind]["environment"]["num_requests"],
            rate=results[kind]["requests_per_s"],
            load="four fifths",
        )
        sections.append(Section(NAMES[kind], (text,), _waiting(results[kind]["stages"])))
    until = max((len(run.steps) for run in timelines.values()), default=0)
    pictures = [_timeline(name, run, results["timeline"][name], until) for name, run in timelines.items()]
    steps = results.get("events", {})
    sections.append(Section("Who sits where", (TIMELINE,), _order(results["timeline"]), pictures, steps))
    budgets = results["budgets"]
    text = BUDGET.format(prompt=budgets["prompt_tokens"])
    sections.append(
        Section("The token budget", (text,), _budgets(budgets["by_budget"]), (_curve(budgets["by_budget"]),))
    )
    sections.append(Section("Where it loses", (LOSES,)))
    footer = (
        f"{env['num_requests']} requests of workload '{env['workload']}', at most {env['max_num_seqs']} at once, "
        f"{human_bytes(env['kv_bytes'])} of KV memory, {env['model']}, {env['dtype']}. {describe(env)}. "
        f"Trace sha256 {env['trace_hash'][:16]}."
    )
    overview = [_overview(kind, results) for kind in NAMES]
    title = "The batch, decided anew at every step"
    return Report(title, _lead(results), sections, footer, dict(results), overview)


def _overview(kind: str, results: Mapping[str, Any]) -> Group:
    """Without stage 1, which serves fewer and shorter requests."""
    stages = {name: stage for name, stage in results[kind]["stages"].items() if name != "stage1_naive"}
    env = results["environment"] if kind == "at_once" else results[kind]["environment"]
    about = f"{env['num_requests']} requests of workload '{env['workload']}', at most {env['max_num_seqs']} at once."
    return multiples(NAMES[kind], about, stages)


def _lead(results: Mapping[str, Any]) -> str:
    stages = {name: stage["median"] for name, stage in results["at_once"]["stages"].items()}
    last = list(stages)[-1]
    speed = stages[last]["output_tok_s"]
    times = ", ".join(
        f"{speed / figures['output_tok_s']:.1f} times the tokens of {name}"
        for name, figures in stages.items()
        if name != last
    )
    busy = stages[last]["occupancy_while_others_wait"]
    return f"{last} gives {times}; its places are {busy:.1%} busy while requests wait."


def _speed(stages: Mapping[str, Any]) -> Table:
    rows = []
    for name, stage in stages.items():
        figures = stage["median"]
        rows.append([
            name,
            f"{figures['counters']['sequences_finished']:.0f}",
            f"{figures['output_tok_s']:.1f}",
            f"{stage['min']['output_tok_s']:.1f}..{stage['max']['output_tok_s']:.1f}",
            f"{figures['occupancy_while_others_wait']:.1%}",
            f"{figures['counters']['forwards']:,.0f}",
            f"{figures['counters']['idle_slot_steps']:,.0f}",
            *_times(figures),
        ])  # fmt: skip
    columns = (
        "stage",
        "requests",
        "output tok/s",
        "range",
        "occupancy",
        "forwards",
        "idle slot-steps",
        *TIMES,
    )
    return Table(columns, rows)


TIMES = ("TTFT p50 / p95 / p99", "TPOT p50 / p95 / p99")


def _times(figures: Mapping[str, Any]) -> list[str]:
    quantiles = ("p50", "p95", "p99")
    return [
        " / ".join(f"{figures['ttft_s'][q]:.2f}" for q in quantiles) + " s",
        " / ".join(f"{1e3 * figures['tpot_s'][q]:.0f}" for q in quantiles) + " ms",
    ]


def _waiting(stages: Mapping[str, Any]) -> Table:
    rows = [
        [
            name,
            f"{stage['median']['output_tok_s']:.1f}",
            f"{stage['median']['running']['mean']:.1f}",
            *_times(stage["median"]),
        ]
        for name, stage in stages.items()
    ]
    return Table(("stage", "output tok/s", "running, mean", *TIMES), rows)


def _order(timelines: Mapping[str, Any]) -> Table:
    rows = [
        [name, f"{t['forwards']}", f"{t['idle_slot_steps']}", f"{t['mean_finish_forward']:.1f}",
         " ".join(t["finish_order"])]
        for name, t in timelines.items()
    ]  # fmt: skip
    return Table(("stage", "forwards", "idle slot-steps", "mean end, forward", "finish order"), rows)


def _timeline(name: str, run: Run, figures: Mapping[str, Any], until: int) -> Picture:
    words = (
        f"{name}: three places over {figures['forwards']} forwards, {figures['idle_slot_steps']} of them idle; "
        f"requests end in the order {' '.join(figures['finish_order'])}"
    )
    return Picture(f"timeline-{name}", slot_timeline(run, name, until), words, on_page=False)


def _budgets(by_budget: Mapping[str, Any]) -> Table:
    rows = [
        [
            budget,
            f"{1e3 * figures['itl_p50_s']:.0f} ms",
            f"{1e3 * figures['itl_max_s']:.0f} ms",
            f"{figures['ttft_s']:.2f} s",
            f"{figures['forwards']:.0f}",
        ]
        for budget, figures in by_budget.items()
    ]
    columns = ("budget, tokens", "others' gap, median", "others' gap, longest", "its first token",
               "forwards until then")  # fmt: skip
    return Table(columns, rows)


def _curve(by_budget: Mapping[str, Any]) -> Picture:
    words = "; ".join(
        f"budget {budget}: others wait at most {1e3 * f['itl_max_s']:.0f} ms, first token after {f['ttft_s']:.2f} s"
        for budget, f in by_budget.items()
    )
    return Picture("budget", budget_curve(by_budget), words)
