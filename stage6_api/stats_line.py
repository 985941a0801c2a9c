"""A line in the log every ten seconds in which something happened: how fast, how full, how much was shared."""

from __future__ import annotations

import asyncio
import logging

from stage6_api.metrics import EngineMetrics
from stage6_api.served import Served

log = logging.getLogger("sixstage.stats")

SECONDS = 10.0
COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


async def report_forever(served: Served) -> None:
    """Write the line until cancelled."""
    before = _counted(served.metrics)
    while True:
        await asyncio.sleep(SECONDS)
        now = _counted(served.metrics)
        if now != before:
            log.info(line(served.metrics, {name: now[name] - before[name] for name in COUNTERS}))
        before = now


def line(metrics: EngineMetrics, gained: dict[str, float]) -> str:
    """What the last seconds brought.  The hit rate is that of the prompts in them."""
    queried = gained["prefix_cache_queries"]
    return (
        f"prompt {gained['prompt_tokens'] / SECONDS:.1f} tok/s, "
        f"generation {gained['generation_tokens'] / SECONDS:.1f} tok/s, "
        f"running {metrics.value('num_requests_running'):.0f}, "
        f"waiting {metrics.value('num_requests_waiting'):.0f}, "
        f"KV {metrics.value('kv_cache_usage_perc'):.1%}, "
        f"prefix hits {gained['prefix_cache_hits'] / queried if queried else 0.0:.1%}"
    )


def _counted(metrics: EngineMetrics) -> dict[str, float]:
    return {name: metrics.value(f"{name}_total") for name in COUNTERS}
