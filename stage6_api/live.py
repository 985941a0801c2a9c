"""`/live`: a page that shows the engine at work, and what feeds it.  There only if the operator asks for it."""

from __future__ import annotations

import re
from functools import cache, partial
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from stage6_api.live_view import LiveView
from stage6_api.schemas import Base
from stage6_api.served import Served
from stage6_api.sse import EventStream

router = APIRouter(include_in_schema=False)
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


class Pace(Base):
    """`POST /live/pace`: seconds to wait after each step."""

    seconds: float


def make_view(served: Served) -> LiveView:
    """What `/live/events` streams, over one model."""
    about = {"stage": served.stage, "model": served.name, "max_len": served.max_len}
    return LiveView(served.engine, about)


@router.get("/live")
async def page() -> Response:
    """The page.  It holds nothing that a key would protect; its data comes with one."""
    return HTMLResponse(_page(), headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})


@router.get("/live/events")
async def events(request: Request) -> Response:
    """The engine, step by step, as server-sent events."""
    view: LiveView = request.app.state.live
    served: Served = request.app.state.served
    served.engine.check_ready()
    mailbox = view.join()
    return EventStream(view.frames(mailbox), partial(view.leave, mailbox), served.settings.keep_alive_seconds)


@router.post("/live/pace")
async def pace(body: Pace, request: Request) -> Pace:
    """Slow the engine down; it goes at full speed again when the last stream of events ends."""
    view: LiveView = request.app.state.live
    view.set_pace(body.seconds)
    return body


@cache
def _page() -> str:
    """One piece out of the files that it is written in: `{{ live.css }}` stands for that file."""
    folder = files("stage6_api")
    whole = (folder / "live.html").read_text("utf-8")
    return re.sub(r"{{ (live\w*\.\w+) }}", lambda found: (folder / found[1]).read_text("utf-8"), whole)
