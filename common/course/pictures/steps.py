"""What a step takes: by the length of the text, by part, and against what the machine could do."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from common.course.pictures.palette import FAINT, INK, Mark, dress, legend, new_figure, stage_color

PARTS = {
    "layers": Mark("linear layers and norms", "#1f5f94"),
    "attention": Mark("attention", "#e9b44c", "//"),
    "sampling": Mark("packing and sampling", "#c9a3bf", ".."),
    "engine": Mark("the engine itself", "#e6e9ec", "xx"),
}
"""Where a step's time goes, as `common.bench.step` measures it."""


def token_time_curve(by_length: Mapping[str, Mapping[str, float]]) -> Figure:
    """Time of the next token against the length of the text before it, one curve per stage.

    Args:
        by_length: stage -> length in tokens -> seconds.
    """
    figure = new_figure(7.0, 3.2)
    axes = figure.subplots()
    for number, (stage, times) in enumerate(by_length.items()):
        lengths, heights = [int(n) for n in times], [1e3 * s for s in times.values()]
        axes.plot(lengths, heights, color=stage_color(stage), marker="os^D"[number % 4], linewidth=2,
                  linestyle=("-", "--")[number % 2], label=stage)  # fmt: skip
        axes.annotate(f"{heights[-1]:.0f} ms", (lengths[-1], heights[-1]), (4, 4), textcoords="offset points",
                      fontsize=8, color=INK)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    dress(axes, xlabel="tokens before it: prompt and answer so far", ylabel="time of the next token, ms")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=INK)
    return figure


def step_parts(parts: Mapping[str, Mapping[str, float]], marks: Mapping[str, Mark] = PARTS) -> Figure:
    """One stacked bar per case: where the time of a step goes, in milliseconds.

    Args:
        parts: case -> part of `marks` -> seconds.
        marks: the parts in order, and how each is drawn.
    """
    figure = new_figure(7.0, 1.4 + 0.5 * len(parts))
    axes = figure.subplots()
    left = [0.0] * len(parts)
    for name, mark in marks.items():
        widths = [1e3 * seconds[name] for seconds in parts.values()]
        axes.barh(list(parts), widths, left=left, color=mark.color, hatch=mark.hatch, edgecolor=INK,
                  linewidth=0.5)  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f"  {total:.1f} ms", va="center", fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left))
    dress(axes, xlabel="time of one step, ms")
    legend(
        figure,
        [Patch(facecolor=m.color, hatch=m.hatch, edgecolor=INK, label=m.label) for m in marks.values()],
    )
    return figure


def roofline(points: Seq[Mapping[str, float]], tokens_per_read: float, tokens_per_multiply: float) -> Figure:
    """Tokens per second against the tokens in one forward, under the two roofs of the machine.

    Below the slope a forward waits for memory: it reads all weights, for one token as for many.  Under the
    flat roof it waits for arithmetic.

    Args:
        points: `rows` (tokens in the forward) and `seconds`, measured.
        tokens_per_read: forwards per second that the read bandwidth allows, one token each.
        tokens_per_multiply: tokens per second that the multiplications allow.
    """
    figure = new_figure(7.0, 3.4)
    axes = figure.subplots()
    rows = [point["rows"] for point in points]
    speeds = [point["rows"] / point["seconds"] for point in points]
    edges = [rows[0] / 1.3, tokens_per_multiply / tokens_per_read, rows[-1] * 1.6]
    roof = [min(edge * tokens_per_read, tokens_per_multiply) for edge in edges]
    axes.plot(edges, roof, color=INK, linewidth=1.2, linestyle="--")
    axes.fill_between(edges, roof, roof[-1] * 3, color=FAINT, alpha=0.15, linewidth=0)
    axes.plot(rows, speeds, color=stage_color("stage2"), marker="o", linewidth=2)
    for row, speed in zip(rows, speeds, strict=True):
        axes.annotate(f"{row}", (row, speed), (0, -13), textcoords="offset points", ha="center", fontsize=8,
                      color=INK)  # fmt: skip
    beyond = "out of reach (slope: reading all weights for each forward; flat: multiplying)"
    axes.text(edges[0] * 1.1, roof[-1] * 1.2, beyond, fontsize=8, color=INK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(rows, [str(row) for row in rows])
    axes.set_xlim(edges[0], edges[2])
    axes.set_ylim(min(speeds) / 1.8, roof[-1] * 3)
    dress(axes, xlabel="tokens in one forward: the batch", ylabel="tokens per second")
    figure.legend(
        handles=[
            Line2D([], [], color=stage_color("stage2"), marker="o", label="measured, attention left out"),
            Line2D([], [], color=INK, ls="--", label="what the machine could do at best"),
        ],
        loc="outside lower center", ncols=2, fontsize=8, frameon=False, labelcolor=INK,
    )  # fmt: skip
    return figure
