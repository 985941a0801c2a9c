"""The report of `sixstage bench cache`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.record import Run
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.bench.report_multiples import multiples
from common.course.pictures import Piece, Slab, kv_growth, reservations, slot_timeline

CACHED = "stage2_kvcache"
GROWTH = (
    "One request, each row a forward. Without a cache a forward computes the whole text; with one, the first forward "
    "computes the prompt (prefill) and every other one token (decode), and reads the rest."
)
CHATS = (
    "The same requests, all there at the start. Computed per token: tokens that went through the model for each token "
    "of an answer, prompts included. Remembering makes a token cheap; a batch makes the forward worth its price."
)
TAIL = (
    "{requests} requests with real lengths in batches of at most {places}, counted by the stage's own engine. A batch "
    "lasts as long as its longest answer: {occupancy:.0%} of the places are busy, and in {alone:.0%} of the forwards a "
    "single sequence is left."
)
MOMENT = (
    "The slab in the middle of the first batch, stretch by stretch, under three beliefs about the answer's length: "
    "nothing is known, the next power of two, and the true length, which no server can know."
)
LOSES = (
    "K/V costs {per_token} for each token and is kept for as long as the request lives, while a stage that recomputes "
    "needs no memory at all. For an answer of one token a cache has nothing to remember."
)


def cache_report(
    results: Mapping[str, Any], growth: Mapping[str, Run] | None = None, tail: Run | None = None
) -> Report:
    """Put what `common.bench.cache.run` returns into a report.

    Args:
        results: what `run` returns.
        growth: stage -> its record, for the pictures beside the Markdown; the page steps through `events`.
        tail: likewise.
    """
    env, stages, recorded = results["environment"], results["speed"]["stages"], results["events"]
    slabs = {label: _slab(found["slab"]) for label, found in results["moment"].items()}
    grown = {name: run for name, run in recorded.items() if name != "tail"}
    sections = [
        Section(
            "How K/V grows",
            (GROWTH,),
            pictures=[_growth(name, run) for name, run in (growth or {}).items()],
            runs=grown,
        ),
        Section("Chats", (CHATS,), _chats(stages)),
        Section(
            "The tail of a static batch",
            (TAIL.format(**results["tail"]),),
            pictures=[_tail(tail)] if tail else (),
            runs={CACHED: recorded["tail"]},
        ),
        Section("What a reservation holds", (MOMENT,), _moment(results["moment"]), (_slabs(slabs),)),
        Section("Where this loses", (LOSES.format(per_token=human_bytes(results["kv_bytes_per_token"])),)),
    ]
    footer = (
        f"{env['num_requests']} requests of workload '{env['workload']}', prompts and answers cut to {env['longest']} "
        f"tokens, {env['model']}, {env['dtype']}. {describe(env)}. Trace sha256 {env['trace_hash'][:16]}."
    )
    about = f"{env['num_requests']} requests cut to {env['longest']} tokens, all there at the start."
    overview = (multiples("Chats", about, stages),)
    return Report("What remembering is worth", _lead(stages), sections, footer, dict(results), overview)


def _slab(found: Mapping[str, Any]) -> Slab:
    """From a file: a dict for each piece."""
    pieces = tuple(Piece(**piece) for piece in found["pieces"])
    return Slab(found["capacity"], pieces, found["somebody_waits"])


def _lead(stages: Mapping[str, Any]) -> str:
    first, *others = stages
    speed = {name: stage["median"]["output_tok_s"] for name, stage in stages.items()}
    words = ", ".join(f"{name} {speed[name] / speed[first]:.1f} times" for name in others)
    return (
        f"Output tokens per second, {first} being 1: {words}."
        if others
        else f"{first}: {speed[first]:.1f} tok/s."
    )


def _chats(stages: Mapping[str, Any]) -> Table:
    rows = []
    for name, stage in stages.items():
        figures = stage["median"]
        rows.append([
            name,
            f"{figures['output_tok_s']:.1f}",
            f"{stage['min']['output_tok_s']:.1f}..{stage['max']['output_tok_s']:.1f}",
            f"{figures['counters']['forwards']:,.0f}",
            f"{figures['counters']['tokens_computed']:,.0f}",
            f"{figures['computed_per_emitted']:.1f}",
            f"{1e3 * figures['tpot_s']['p50']:.0f} ms",
            f"{figures['ttft_s']['p50']:.2f} s",
        ])  # fmt: skip
    columns = ("system", "output tok/s", "range", "forwards", "tokens computed", "computed per token",
               "TPOT p50", "TTFT p50")  # fmt: skip
    return Table(columns, rows)


def _moment(moment: Mapping[str, Any]) -> Table:
    kinds = ("stored", "later", "never", "free")
    rows = [
        [label, f"{m['requests']}", *(f"{100 * m[kind] / m['capacity']:.1f} %" for kind in kinds)]
        for label, m in moment.items()
    ]
    return Table(
        ("policy", "requests in", "tokens", "set aside, used later", "set aside, never used", "free"), rows
    )


def _growth(name: str, run: Run) -> Picture:
    computed = sum(part.num_new for step in run.steps for part in step.computed)
    read = sum(part.context - part.num_new for step in run.steps for part in step.computed)
    alt = f"{name}: {len(run.steps)} forwards compute {computed} positions and read {read} from the cache"
    return Picture(f"growth-{name}", kv_growth(run, next(iter(run.added)), name), alt, on_page=False)


def _tail(run: Run) -> Picture:
    busy = 1 - run.stats.idle_slot_steps / run.stats.slot_steps
    alt = f"{run.max_num_seqs} places over {len(run.steps)} forwards, {busy:.0%} of them busy; each batch ends ragged"
    return Picture("tail", slot_timeline(run), alt, on_page=False)


def _slabs(slabs: Mapping[str, Slab]) -> Picture:
    words = "; ".join(
        f"{label}: {len(slab.pieces)} requests, {sum(piece.stored for piece in slab.pieces):,} of {slab.capacity:,} "
        "slots hold tokens"
        for label, slab in slabs.items()
    )
    return Picture("slab", reservations(slabs), words)
