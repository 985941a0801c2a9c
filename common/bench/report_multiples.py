"""Small multiples: for one workload a panel per figure, in each panel a bar per engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
"""One engine's figures on a workload, as `common.bench.metrics.summarise` gives them; any may be absent."""


@dataclass(frozen=True)
class Bar:
    """One engine's figure; `low` and `high` are the least and the most of its runs."""

    engine: str
    value: float
    text: str
    low: float
    high: float

    @property
    def number(self) -> str:
        """The stage's number, for its colour; empty for an engine that is none of the stages."""
        found = self.engine.removeprefix("stage")[:1]
        return found if self.engine.startswith("stage") and found.isdigit() else ""

    @property
    def name(self) -> str:
        """Shorter, as there is little room: "5 prefix sharing"."""
        return self.engine.removeprefix("stage").replace("_", " ") if self.number else self.engine


@dataclass(frozen=True)
class Panel:
    """One figure of all engines, all bars on one scale that begins at zero."""

    title: str
    better: str  # "more" or "less"
    bars: Seq[Bar]

    def share(self, value: float) -> float:
        """Percent of the panel's width."""
        most = max(bar.high for bar in self.bars)
        return 100 * value / most if most else 0.0


@dataclass(frozen=True)
class Group:
    """One workload, with what it was measured under."""

    title: str
    about: str
    panels: Seq[Panel]


@dataclass(frozen=True)
class Metric:
    """A figure worth a panel."""

    title: str
    better: str
    find: Callable[[Figures], float | None]
    form: Callable[[float], str]


def _at(*path: str) -> Callable[[Figures], float | None]:
    """The figure at this place; None where it is not."""

    def find(figures: Figures) -> float | None:
        found: Any = figures
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, (int, float)) else None

    return find


def _live_share(figures: Figures) -> float | None:
    """Live of reserved KV memory, mean over forwards, percent."""
    kv = figures.get("kv") or {}
    try:
        return 100 * kv["live_bytes"]["mean"] / kv["reserved_bytes"]["mean"]
    except (KeyError, ZeroDivisionError):
        return None


def _seconds(value: float) -> str:
    return (
        f"{1e3 * value:.1f} ms"
        if value < 0.01
        else f"{1e3 * value:.0f} ms"
        if value < 1
        else f"{value:.2f} s"
    )


METRICS = (
    Metric("Output tokens per second", "more", _at("output_tok_s"), "{:,.1f}".format),
    Metric("First token, median", "less", _at("ttft_s", "p50"), _seconds),
    Metric("Each further token", "less", _at("tpot_s", "p50"), _seconds),
    Metric("Forwards", "less", _at("counters", "forwards"), "{:,.0f}".format),
    Metric("Computed per token", "less", _at("computed_per_emitted"), "{:,.1f}".format),
    Metric("Live of reserved KV memory", "more", _live_share, "{:.0f} %".format),
)


def multiples(title: str, about: str, engines: Mapping[str, Any]) -> Group:
    """A panel for each metric that somebody has.

    Args:
        title: the workload.
        about: what it was measured under, in a few words.
        engines: name -> figures, or what `common.bench.run_stage.collect` makes of several runs.
    """
    panels = (Panel(metric.title, metric.better, _bars(metric, engines)) for metric in METRICS)
    return Group(title, about, [panel for panel in panels if panel.bars])


def _bars(metric: Metric, engines: Mapping[str, Any]) -> list[Bar]:
    bars = []
    for engine, found in engines.items():
        figures = [found.get(which, found) for which in ("median", "min", "max")]
        value, low, high = (metric.find(each) for each in figures)
        if value is not None and low is not None and high is not None:
            bars.append(Bar(engine, value, metric.form(value), low, high))
    return bars
