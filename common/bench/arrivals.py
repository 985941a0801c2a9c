"""When requests come: all at once, one by one at random, or in bursts."""

from __future__ import annotations

import random
from typing import Literal

from common.errors import InvalidValue

Arrival = Literal["at_once", "poisson", "burst"]
BURST = 8  # requests per burst


def arrival_times(kind: Arrival, count: int, rate: float | None = None, seed: int = 0) -> list[float]:
    """Seconds after the start at which each of `count` requests comes, ascending, the first at 0.

    Args:
        kind: `at_once`: all at 0.  `poisson`: independent users, exponential gaps.  `burst`: groups of eight
            at the same moment, gaps between groups exponential; the same mean rate.
        count: requests.
        rate: requests per second, for all kinds but `at_once`.
        seed: the same seed, the same times.

    Raises:
        InvalidValue: an unknown kind, or a rate that is not above 0.
    """
    if kind == "at_once":
        return [0.0] * count
    group = {"poisson": 1, "burst": BURST}.get(kind)
    if group is None:
        raise InvalidValue("arrival", kind, "'at_once', 'poisson' or 'burst'")
    if rate is None or not rate > 0:
        raise InvalidValue("rate", rate, "requests per second, above 0")
    rng, now = random.Random(seed), 0.0
    times: list[float] = []
    while len(times) < count:
        times += [now] * min(group, count - len(times))
        now += rng.expovariate(rate / group)
    return times
