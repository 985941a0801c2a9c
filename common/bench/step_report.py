"""The report of `sixstage bench step`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.report import Picture, Report, Section, Table
from common.course.pictures import roofline, step_parts, token_time_curve
from common.course.pictures.steps import PARTS

LENGTH = (
    "One request alone: how long its next token takes when so many tokens stand before it. Without a cache every one "
    "of them goes through the model again; with one, only the newest does."
)
PART = (
    "A decode step, its prompts of {context} tokens computed before, taken apart by a clock around the engine's "
    "own calls. Stage 1 has no decode step: it computes the whole text each time."
)
ROOF = (
    "A forward reads {gigabytes:.2f} GB of weights, whether it computes one token or many. This machine reads "
    "{read:.1f} GB/s, so no forward is faster than {floor:.1f} ms; and it multiplies {flops:.2f} Tflop/s, so no "
    "batch gives more than {best:,.0f} tokens per second. Where the two meet, at {knee:.0f} tokens, a batch stops "
    "being nearly free."
)
LOSES = (
    "Batching is nearly free only under the slope. From the knee on, each further token costs its own arithmetic, and "
    "on a CPU without matrix units the knee comes early. A cache, on the other hand, is memory: this model keeps "
    "K/V of every token, and what that costs is what `sixstage bench cache` looks at."
)


def step_report(results: Mapping[str, Any]) -> Report:
    """Put what `common.bench.step.run` returns into a report."""
    env, parts = results["environment"], results["parts"]
    roof = results["roofline"]["roofs"]
    sections = [
        Section("By length", (LENGTH,), _by_length(results["by_length"]), (_curve(results["by_length"]),)),
        Section(
            "By part",
            (PART.format(context=parts["context"]),),
            _parts(parts["cases"]),
            (_bars(parts["cases"]),),
        ),
        Section(
            "The roofline",
            (ROOF.format(**roof),),
            _points(results["roofline"]),
            (_roof(results["roofline"]),),
        ),
        Section("Where this loses", (LOSES,)),
    ]
    footer = f"{env['model']}, {env['dtype']}. {describe(env)}."
    return Report("What one step costs", _lead(results["by_length"]), sections, footer, dict(results))


def roof_figures(found: Mapping[str, Any]) -> dict[str, float]:
    """What follows from the two rates: the floor of a forward in ms, the best tokens/s, the knee in tokens."""
    read, flops, weights = (
        found["read_bytes_per_second"],
        found["multiply_flop_per_second"],
        found["weight_bytes"],
    )
    per_token = 2 * weights / (2 if found["dtype"] in ("bfloat16", "float16") else 4)  # multiply and add
    return {
        "gigabytes": weights / 1e9,
        "read": read / 1e9,
        "flops": flops / 1e12,
        "floor": 1e3 * weights / read,
        "forwards": read / weights,
        "best": flops / per_token,
        "knee": flops / per_token / (read / weights),
    }


def _lead(by_length: Mapping[str, Mapping[str, float]]) -> str:
    longest = max(next(iter(by_length.values())), key=int)
    words = ", ".join(f"{1e3 * times[longest]:.0f} ms in {stage}" for stage, times in by_length.items())
    return f"After {longest} tokens of text the next one takes {words}."


def _by_length(by_length: Mapping[str, Mapping[str, float]]) -> Table:
    lengths = list(next(iter(by_length.values())))
    rows = [
        [stage, *(f"{1e3 * times[length]:.1f}" for length in lengths)] for stage, times in by_length.items()
    ]
    return Table(("next token, ms, after", *(f"{length} tokens" for length in lengths)), rows)


def _parts(cases: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        [
            case,
            *(f"{1e3 * seconds[part]:.1f}" for part in PARTS),
            f"{1e3 * seconds['total'] / seconds['tokens']:.1f}",
        ]
        for case, seconds in cases.items()
    ]
    columns = ("one step, ms", *(mark.label for mark in PARTS.values()), "per token")
    return Table(columns, rows)


def _points(found: Mapping[str, Any]) -> Table:
    rows = [
        [f"{p['rows']}", f"{1e3 * p['forward_s']:.1f}", f"{p['rows'] / p['forward_s']:.0f}"]
        for p in found["points"]
    ]
    return Table(("tokens in the forward", "forward, ms", "tokens per second"), rows)


def _curve(by_length: Mapping[str, Mapping[str, float]]) -> Picture:
    words = "; ".join(
        f"{stage}: "
        + ", ".join(f"{1e3 * seconds:.0f} ms after {length}" for length, seconds in times.items())
        for stage, times in by_length.items()
    )
    return Picture("by-length", token_time_curve(by_length), f"Time of the next token. {words}")


def _bars(cases: Mapping[str, Mapping[str, float]]) -> Picture:
    words = "; ".join(
        f"{case}: " + ", ".join(f"{mark.label} {1e3 * seconds[part]:.1f} ms" for part, mark in PARTS.items())
        for case, seconds in cases.items()
    )
    return Picture("parts", step_parts(cases), f"Where a step's time goes. {words}")


def _roof(found: Mapping[str, Any]) -> Picture:
    points = [{"rows": point["rows"], "seconds": point["forward_s"]} for point in found["points"]]
    roof = found["roofs"]
    words = ", ".join(f"{p['rows']} tokens {p['rows'] / p['seconds']:.0f}" for p in points)
    alt = f"Tokens per second by tokens in the forward: {words}; the roofs meet at {roof['knee']:.0f} tokens"
    return Picture("roofline", roofline(points, roof["forwards"], roof["best"]), alt)
