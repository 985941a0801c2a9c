"""What a cell of the comparison holds: figures of each run, their medians, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from common.bench.metrics import percentiles
from common.bench.peers.process import CutOff, Ended
from common.bench.peers.workloads import Headline


def run_figures(ended: Ended) -> dict[str, Any]:
    """Figures of one run as plain numbers.

    * `output_tok_s`: answer tokens of all requests over the seconds from their arrival to the last token.
    * `token_ms`: milliseconds per token after an answer's first, mean over the requests; 0 where there is none.
    * `ttft_s`: median over the requests of the seconds to the first token; `ttft` has more of them.
    """
    first = [first for first, _, _ in ended.requests]
    between = [(last - first) / (tokens - 1) for first, last, tokens in ended.requests if tokens > 1]
    return {
        "seconds": ended.seconds,
        "output_tok_s": sum(tokens for _, _, tokens in ended.requests) / ended.seconds,
        "token_ms": 1e3 * fmean(between) if between else 0.0,
        "ttft_s": median(first),
        "ttft": percentiles(first),
    }


@dataclass
class Cell:
    """One engine on one workload.

    Attributes:
        runs: figures of each measured run.
        cut_off: if a run took too long: the seconds that it had, and the tokens that it reached.
        failed: if it could not be done: why, in a line.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    cut_off: dict[str, float] | None = None
    failed: str = ""

    @property
    def closed(self) -> bool:
        """Whether further runs would bring nothing."""
        return self.cut_off is not None or bool(self.failed)

    @property
    def measured(self) -> bool:
        """Whether there are figures to compare."""
        return bool(self.runs) and not self.closed

    def add(self, outcome: Ended | CutOff) -> None:
        """Take in what a run came to."""
        if isinstance(outcome, CutOff):
            self.cut_off = {"seconds": outcome.seconds, "tokens": outcome.tokens}
        else:
            self.runs.append(run_figures(outcome))

    def spread(self, figure: str) -> tuple[float, float, float]:
        """(median, least, greatest) of a figure over the runs."""
        values = [run[figure] for run in self.runs]
        return median(values), min(values), max(values)

    def to_json(self) -> dict[str, Any]:
        """All that is known, in plain types."""
        if self.failed:
            return {"failed": self.failed}
        if self.cut_off is not None:
            return {"cut_off": self.cut_off, "runs": self.runs}
        medians = {
            name: median(run[name] for run in self.runs)
            for name in ("seconds", "output_tok_s", "token_ms", "ttft_s")
        }
        return {"median": medians, "runs": self.runs}


def best(cells: dict[str, Cell], headline: Headline) -> str | None:
    """Name of the engine with the best median; None if nobody has one."""
    measured = {name: cell.spread(headline.figure)[0] for name, cell in cells.items() if cell.measured}
    if not measured:
        return None
    choose = max if headline.more_is_better else min
    return choose(measured, key=measured.__getitem__)


def advantage(ours: float, theirs: float, headline: Headline) -> float:
    """How many times better ours is; below 1 it is worse."""
    return ours / theirs if headline.more_is_better else theirs / ours
