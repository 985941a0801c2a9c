"""The page: any number of reports in one HTML file that needs nothing else, neither network nor other files."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from common.course.pictures import to_svg
from common.course.pictures.palette import REQUESTS, STAGES

if TYPE_CHECKING:
    from common.bench.report import Report

TITLE = "Six stages, measured"


def to_html(reports: Seq[Report]) -> str:
    """One page of these reports: overview first, then each report's sections.

    Without script it shows everything but what is stepped through; of that the tables give the figures.
    """
    folder = files("common.bench")
    source, style, script = (
        folder.joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    alone = reports[0] if len(reports) == 1 else None
    return environment.from_string(source).render(
        reports=reports, alone=alone, title=alone.title if alone else TITLE, svg=to_svg, style=style,
        script=script, in_script=in_script, requests=REQUESTS, stages=STAGES,
    )  # fmt: skip


def in_script(data: Any) -> str:
    """JSON that can stand in a `<script>` element: nothing in it ends the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
