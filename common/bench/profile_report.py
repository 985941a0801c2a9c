"""The report of `sixstage bench profile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.peers.workloads import WORKLOADS
from common.bench.profile_clock import PARTS
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.course.pictures import step_parts
from common.course.pictures.palette import Mark

MARKS = {
    "linear": Mark(PARTS["linear"], "#1f5f94"),
    "attention": Mark(PARTS["attention"], "#e9b44c", "//"),
    "small": Mark(PARTS["small"], "#8fc1e3", "\\\\"),
    "head": Mark(PARTS["head"], "#5b8db8", "--"),
    "sampling": Mark(PARTS["sampling"], "#c9a3bf", ".."),
    "scheduling": Mark(PARTS["scheduling"], "#d97b5f", "xx"),
    "batch": Mark(PARTS["batch"], "#8bb174", "++"),
    "booking": Mark(PARTS["booking"], "#b0a58f", "||"),
    "text": Mark(PARTS["text"], "#f2d6a2", "oo"),
    "other": Mark(PARTS["other"], "#e6e9ec"),
}
WHOLE = (
    "All steps of each workload, prompts and answers together. The norms, rotation and activation have the rest of "
    "the forward's Python with them; text and output is what makes text of tokens."
)
DECODE = (
    "Medians over the steps in which every sequence gets one token. Outside the forward is everything but the first "
    "four parts. The clock itself costs about 0.2 ms of a step, most of it inside the forward."
)
PROMPT = (
    "Medians over the steps that compute prompts, or parts of them, beside the tokens of others. Here arithmetic "
    "takes the time, so what does not grow with the tokens hardly shows."
)
KINDS = {"prompt": ("Steps with prompts", PROMPT), "decode": ("Decode steps", DECODE)}

Cases = Mapping[str, Mapping[str, Any]]


def profile_report(results: Mapping[str, Any]) -> Report:
    """Put what `common.bench.profile.run` returns into a report."""
    env, cases = results["environment"], results["cases"]
    sections = [Section("The whole workload", (WHOLE,), _shares(cases))]
    for kind, (heading, text) in KINDS.items():
        own = {case: found[kind] for case, found in cases.items() if found[kind]}
        if own:
            sections.append(Section(heading, (text,), _steps(own), (_picture(kind, own),)))
    about = "; ".join(f"{name}: {WORKLOADS[name].about}" for name in WORKLOADS if _has(cases, name))
    peak = results["peak_memory_bytes"]
    footer = (
        f"{about}. {', '.join(env['stage'])}, {env['model']}, {env['dtype']}, "
        f"at most {env['max_num_seqs']} sequences and {env['max_num_batched_tokens']} tokens in a forward, "
        f"{human_bytes(env['kv_bytes'])} of KV memory"
        f"{f', at most {human_bytes(peak)} of memory in all' if peak else ''}. {describe(env)}."
    )
    return Report("Where the time goes", _lead(cases), sections, footer, dict(results))


def _has(cases: Cases, workload: str) -> bool:
    return any(case.endswith(f", {workload}") for case in cases)


def _lead(cases: Cases) -> str:
    words = []
    for case, found in zip(_labels(cases), cases.values(), strict=True):
        if found["decode"]:
            step = found["decode"]
            words.append(
                f"{case}: a decode step of {step['num_seqs']:.0f} takes {1e3 * sum(step['median_s'].values()):.1f} "
                f"ms, {step['outside_forward']:.1%} of it outside the forward"
            )
    return "; ".join(words) + "."


def _labels(cases: Cases) -> list[str]:
    """What tables and pictures call the cases: by workload alone where there is one stage only."""
    several = len({case.partition(", ")[0] for case in cases}) > 1
    return [case if several else case.partition(", ")[2] for case in cases]


def _shares(cases: Cases) -> Table:
    totals = [sum(found["seconds"].values()) for found in cases.values()]
    rows = [
        [
            name,
            *(
                f"{found['seconds'][part] / total:.1%}"
                for found, total in zip(cases.values(), totals, strict=True)
            ),
        ]
        for part, name in PARTS.items()
    ]
    rows.append(["in all", *(f"{total:.1f} s" for total in totals)])
    return Table(("share of the time", *_labels(cases)), rows)


def _steps(own: Cases) -> Table:
    found = list(own.values())
    rows = [
        ["steps", *(f"{one['steps']}" for one in found)],
        ["tokens in a step", *(f"{one['tokens'] / one['steps']:.0f}" for one in found)],
        *(
            [f"{name}, ms", *(f"{1e3 * one['median_s'][part]:.2f}" for one in found)]
            for part, name in PARTS.items()
        ),
        ["in all, ms", *(f"{1e3 * sum(one['median_s'].values()):.1f}" for one in found)],
    ]
    if all("outside_forward" in one for one in found):
        rows.append(["outside the forward", *(f"{one['outside_forward']:.1%}" for one in found)])
    return Table(("one step", *_labels(own)), rows)


def _picture(kind: str, own: Cases) -> Picture:
    parts = dict(zip(_labels(own), (found["median_s"] for found in own.values()), strict=True))
    words = "; ".join(
        f"{case}: " + ", ".join(f"{name} {1e3 * seconds[part]:.2f} ms" for part, name in PARTS.items())
        for case, seconds in parts.items()
    )
    return Picture(kind, step_parts(parts, MARKS), f"Where a step's time goes. {words}")
