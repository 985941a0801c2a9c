"""Figures as SVG for pages and as PNG for everything else."""

from __future__ import annotations

import io
from html import escape

import matplotlib
from matplotlib.figure import Figure

from common.course.pictures.palette import INK


def to_svg(figure: Figure, alt: str, themed: bool = True) -> str:
    """The figure as one `<svg>` element.

    Args:
        figure: made by this package.
        alt: what the picture says, for whoever cannot see it.
        themed: draw ink in the surrounding text's colour, so that it suits light and dark pages; otherwise
            keep ink dark and put it on white, for viewers that know no themes.
    """
    buffer = io.StringIO()
    # The salt makes ids, and so files, the same on every run.
    with matplotlib.rc_context({"svg.hashsalt": "sixstage", "svg.fonttype": "path", "hatch.linewidth": 0.6}):
        background = "none" if themed else "white"
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, facecolor=background)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    if themed:
        svg = svg.replace(INK, "currentColor")
    label = escape(alt, quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def to_png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure on white, as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()
