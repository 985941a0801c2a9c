"""A recorded run as a page can step through it: small JSON, and nothing in it but what the recorder saw.

Memory changes little from one forward to the next, so it is written down as *stays*: one sequence at one place,
from its first forward there to its last.  What a stay holds grows mostly by one token per forward, so a stay is a
few pieces `[forward, used, growth, reserved]`, each good until the next: at forward f `used + growth * (f - forward)`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from common.bench.record import Key, Run, StepRecord
from common.course.pictures.timeline import assign_rows

MOST_FORWARDS = 3000
"""A page shows no more of one run; what it leaves out it says."""

Events = dict[str, Any]
"""What `events` returns: plain JSON, so that it can come from a file as well."""


def events(run: Run) -> Events:
    """The forwards of a run that was recorded with its memory at every one of them.

    Returns:
        A dict of plain values; lists have one entry per forward unless said otherwise:

        * `capacity`, `bytes_per_token`: KV memory in token slots, and what one takes.
        * `places`: most sequences in a batch; `total`: forwards of the whole run, which may be more than are here.
        * `who`: [name, number of its request in order of arrival] of each sequence that was computed or held memory.
        * `seconds`, `waiting`, `reserved`, `live`: when the forward was over, sequences in the queue, token slots
          reserved, and slots of unfinished sequences that hold a token's K/V.
        * `seats`: [who, row, first forward, last forward, tokens computed in each], for runs of like forwards.
        * `stays`: [who, first slot, first forward, last forward, pieces], see above.
        * `ends`: [forward, who] for each sequence that finished.
    """
    steps = run.steps[:MOST_FORWARDS]
    request = {request_id: at for at, request_id in enumerate(run.added)}
    seen = [(span.request_id, span.index) for step in steps for span in step.spans]
    seen += [(part.request_id, part.index) for step in steps for part in step.computed]
    keys = sorted(set(seen), key=lambda key: (request[key[0]], key[1]))
    number = {key: at for at, key in enumerate(keys)}
    ended: dict[Key, int] = {key: at for at, step in enumerate(steps) for key in step.finished}
    usage = steps[0].usage if steps else None
    return {
        "capacity": usage.capacity if usage else 0,
        "bytes_per_token": usage.bytes_per_token if usage else 0,
        "places": run.max_num_seqs,
        "total": len(run.steps),
        "who": [[f"{name}.{index}" if index else name, request[name]] for name, index in keys],
        "seconds": [round(step.seconds, 4) for step in steps],
        "waiting": [step.waiting for step in steps],
        "reserved": [step.usage.reserved for step in steps],
        "live": [_live(step, at, ended) for at, step in enumerate(steps)],
        "seats": _seats(steps, run.max_num_seqs, number),
        "stays": _stays(steps, ended, number),
        "ends": [[at, number[key]] for key, at in sorted(ended.items(), key=lambda end: end[1])],
    }


def _live(step: StepRecord, at: int, ended: dict[Key, int]) -> int:
    """Slots that hold K/V of a sequence that has not ended before this forward."""
    return sum(span.used for span in step.spans if ended.get((span.request_id, span.index), at) >= at)


def _seats(steps: Seq[StepRecord], places: int, number: dict[Key, int]) -> list[list[int]]:
    """Unbroken runs of forwards in which a sequence sat in one row and computed equally many tokens."""
    seats: list[list[int]] = []
    latest: dict[Key, list[int]] = {}
    for at, (step, rows) in enumerate(zip(steps, assign_rows(steps, places), strict=True)):
        for part in step.computed:
            key = (part.request_id, part.index)
            seat = latest.get(key)
            if seat is not None and seat[1] == rows[key] and seat[3] == at - 1 and seat[4] == part.num_new:
                seat[3] = at
                continue
            latest[key] = [number[key], rows[key], at, at, part.num_new]
            seats.append(latest[key])
    return seats


def _stays(steps: Seq[StepRecord], ended: dict[Key, int], number: dict[Key, int]) -> list[list[Any]]:
    """Unbroken stays of a sequence at a place, with what they held; nothing once the sequence has ended."""
    stays: list[list[Any]] = []
    latest: dict[tuple[int, int], list[Any]] = {}
    for at, step in enumerate(steps):
        for span in step.spans:
            key = (span.request_id, span.index)
            used = span.used if ended.get(key, at) >= at else 0
            place = (number[key], span.start)
            stay = latest.get(place)
            if stay is None or stay[3] != at - 1:
                stay = latest[place] = [*place, at, at, [[at, used, 0, span.reserved]]]
                stays.append(stay)
            else:
                stay[3] = at
                _continue(stay[4], at, used, span.reserved)
    return stays


def _continue(pieces: list[list[int]], at: int, used: int, reserved: int) -> None:
    """Let the last piece go on if it foretells this forward, turn its growth if it is new, or begin another."""
    begin, first, growth, held = pieces[-1]
    if reserved == held and used == first + growth * (at - begin):
        return
    if reserved == held and at == begin + 1:
        pieces[-1][2] = used - first
    else:
        pieces.append([at, used, 0, reserved])
