"""Lets any number of people look at an engine while it runs.  As long as nobody does, it is not there.

    engine thread                                     event loop
    look(engine), between two steps
      at most 30 times a second: a snapshot -- post ->  the newest one of each viewer  ->  its stream
      with a pace: wait, and take in what comes

A viewer who reads slowly misses snapshots and never holds the engine up: of those that it has not yet read
only the newest is kept.  The pace is the viewers': with the last of them it goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from common.protocol import Engine
from stage6_api.async_engine import AsyncEngine
from stage6_api.errors import ApiError, bad_request
from stage6_api.live_snapshot import describe, sharing_pool, snapshot
from stage6_api.sse import named_frame

log = logging.getLogger("sixstage.live")

MAX_PACE = 2.0  # seconds
BETWEEN_LOOKS = 1 / 30  # seconds; more than eyes can follow, and no more than a hundredth of an engine's time
NAP = 0.05  # seconds; a held engine wakes so often to take in what has come
COPIES_KEPT = 64

Mailbox = asyncio.Queue[bytes]
"""Holds one frame: the newest that its viewer has not got yet."""


class LiveView:
    """The viewers of one engine, and what they see.

    Args:
        engine: what is looked at, between its steps.
        about: what else viewers are told at the start (names of stage and model).
    """

    def __init__(self, engine: AsyncEngine, about: dict[str, Any]) -> None:
        self._engine = engine
        self._first = named_frame({"type": "engine", **about, **describe(engine.engine)})
        self._mailboxes: list[Mailbox] = []
        self._pace = 0.0  # this and the next: written on one side, read on the other
        self._broken = False
        # The engine thread's own:
        self._copies: deque[tuple[int, int, int]] = deque(maxlen=COPIES_KEPT)  # (step, source, target)
        self._shown: object = None  # of which state the last snapshot was
        self._shown_at = 0.0
        self._stepped: object = None  # the step after which the present pause is
        self._stepped_at = 0.0

    # The event loop's side.

    @property
    def num_viewers(self) -> int:
        """Streams that are open."""
        return len(self._mailboxes)

    def join(self) -> Mailbox:
        """Let one more viewer look, from now until `leave`."""
        self._loop = asyncio.get_running_loop()
        mailbox: Mailbox = asyncio.Queue(maxsize=1)
        self._mailboxes.append(mailbox)
        self._engine.call(self._open)
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """A viewer has gone; the last one takes the pace with it, and the engine is alone again."""
        self._mailboxes.remove(mailbox)
        if not self._mailboxes:
            self._pace = 0.0
            self._engine.call(self._close)

    async def frames(self, mailbox: Mailbox) -> AsyncIterator[bytes]:
        """Server-sent events: first an "engine", then a "step" whenever there is a newer one."""
        yield self._first
        while not self._over():
            try:
                yield await asyncio.wait_for(mailbox.get(), timeout=0.5)
            except asyncio.TimeoutError:
                continue

    def set_pace(self, seconds: float) -> None:
        """Wait so long after each step.

        Raises:
            ApiError: out of range, or nobody is looking.
        """
        if not 0 <= seconds <= MAX_PACE:
            raise bad_request(f"seconds: got {seconds}, allowed: 0 to {MAX_PACE}", "seconds")
        if not self._mailboxes:
            raise ApiError(409, "Nobody is looking: the pace is that of open streams of /live/events.")
        self._pace = seconds
        self._engine.call(lambda: None)  # wakes an idle engine, so that everyone hears of it

    def publish(self, seen: dict[str, Any]) -> None:
        """Give every viewer this snapshot, in place of one that it has not got yet."""
        frame = named_frame({"type": "step", **seen})
        for mailbox in self._mailboxes:
            if mailbox.full():
                mailbox.get_nowait()
            mailbox.put_nowait(frame)

    def _over(self) -> bool:
        """Whether nothing more will be seen: the server is about to end, or looking has failed."""
        engine = self._engine
        ended = engine.failure is not None or (engine.draining and not engine.num_live_jobs)
        return ended or self._broken

    # The engine thread's side.

    def _open(self) -> None:
        """Begin to look; or show what there is once more, to one who has just come."""
        pool = sharing_pool(self._engine.engine)
        if pool is not None and pool.events is None:
            pool.events = []
        self._shown = None
        self._broken = False
        self._engine.between_steps = self._look

    def _close(self) -> None:
        self._engine.between_steps = None
        pool = sharing_pool(self._engine.engine)
        if pool is not None:
            pool.events = None

    def _look(self, engine: Engine) -> bool:
        """Show what has changed; True holds the next step back for now.  A fault here is no fault of the engine."""
        try:
            self._note_copies(engine)
            self._show(engine)
            return self._hold(engine)
        except Exception:
            log.exception("the live view has failed")
            self._broken = True
            self._close()
            return False

    def _note_copies(self, engine: Engine) -> None:
        pool = sharing_pool(engine)
        if pool is None or not pool.events:
            return
        for event in pool.events:
            if event.kind == "copy" and event.source is not None:
                self._copies.append((engine.stats.forwards, event.source, event.block))
        pool.events.clear()

    def _show(self, engine: Engine) -> None:
        """Post a snapshot, if there is something new and it is time; what stays when all is done always comes."""
        stats, now = engine.stats, time.monotonic()
        state = (stats.forwards, stats.requests_added, stats.sequences_aborted, self._pace)
        too_soon = now < self._shown_at + BETWEEN_LOOKS and engine.has_unfinished()
        if state == self._shown or (too_soon and self._shown is not None):
            return
        self._shown, self._shown_at = state, now
        seen = {"time": now, "pace": self._pace, "copied": list(self._copies), **snapshot(engine)}
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.publish, seen)

    def _hold(self, engine: Engine) -> bool:
        """Whether the pause after the last step is still going on; sleeps a little of it.

        An idle engine pauses as well once something comes, so that it is seen in the queue.
        """
        pace = 0.0 if self._engine.draining else self._pace
        if not engine.has_unfinished():
            self._stepped = None
            return pace > 0
        now = time.monotonic()
        if self._stepped != engine.stats.forwards:
            self._stepped, self._stepped_at = engine.stats.forwards, now
        left = self._stepped_at + pace - now
        if left > 0:
            time.sleep(min(left, NAP))
        return left > 0
