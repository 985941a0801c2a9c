"""The report of `sixstage bench capacity`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.block_picture import Tables, blocks_picture
from common.bench.environment import describe
from common.bench.memory import Split
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.bench.report_multiples import multiples
from common.course.pictures import memory_bars

MEMORY = (
    "What the KV memory held, averaged over the forwards during which requests waited. Token states: K/V "
    "of unfinished requests. Reservation: set aside and used later. Internal: set aside and never used, "
    "or kept although its request has ended. External: free while requests wait, and of no use to the "
    "next of them. Rest: free for other reasons (the batch is closed)."
)
FITS = (
    "Counted by the stages' own engines without a model, so places and token budget never bind: memory "
    "alone decides how many requests are in. No engine knows how long an answer gets; stage 2 reserves by "
    "what the client asked for: nothing in particular (max length), the next power of two, or its true "
    "length, which nobody can know. Requests leave a batch as they end, so the mean is below the peak; "
    "only stage 4 refills."
)
BLOCKS = (
    "The pool of a paged engine, stopped in the middle: any free block serves any sequence, and its block table "
    "says where everything is. Only the last block of a sequence has an empty end."
)
SWEEP = (
    "Small blocks waste less, since only a sequence's last block is partly empty; they cost longer tables "
    "and more indirection. Large blocks waste half a block per sequence."
)
SPEED = (
    "The real model on a smaller slice of the same workload, KV memory scaled down with it; medians of "
    "runs in alternating order. Batches are static up to stage 3, so what paging frees shows in speed "
    "only as larger batches at their start; continuous batching (stage 4) is what keeps them large."
)
LOSES = (
    "One request alone has no neighbour to share memory with: paging can only cost. This is the price of "
    "going through a block table."
)


def capacity_report(results: Mapping[str, Any]) -> Report:
    """Put what `common.bench.capacity.run` returns into a report; a file's may lack `blocks`."""
    env, memory = results["environment"], results["memory"]
    sections = [
        Section("What the memory holds", (MEMORY,), split_table(memory), (split_picture(memory),)),
        Section("How many requests fit", (FITS,), _residents(memory)),
    ]
    if results.get("blocks"):
        stage, tables = results["blocks"]["stage"], Tables(**results["blocks"]["tables"])
        sections.append(Section("Where the blocks lie", (BLOCKS,), pictures=(blocks_picture(stage, tables),)))
    if results["block_sizes"]:
        sections.append(Section("Block size", (SWEEP,), _sweep(results)))
    ran = results["speed"]["environment"]
    single = all(len(stage["runs"]) == 1 for stage in results["speed"]["stages"].values())
    slice_ = (
        f"Here: {ran['num_requests']} requests, prompts and answers cut to {ran['longest']} tokens, context "
        f"{ran['max_model_len']}, KV memory for {ran['kv_bytes'] // memory_per_token(memory):,} tokens; "
        + ("one run each." if single else "each run in a fresh process.")
    )
    sections.append(Section("Speed", (SPEED, slice_), _speed(results["speed"]["stages"])))
    sections.append(Section("Where paging loses", (LOSES,), _speed(results["alone"]["stages"])))
    footer = (
        f"{env['num_requests']} requests of workload '{env['workload']}', {human_bytes(env['kv_bytes'])} of "
        f"KV memory ({env['kv_bytes'] // memory_per_token(memory):,} tokens), context "
        f"{env['max_model_len']}, "
        f"{env['model']}, {env['dtype']}. {describe(env)}. Trace sha256 {env['trace_hash'][:16]}."
    )
    about = f"{ran['num_requests']} requests, as many as the memory holds at once."
    overview = (multiples("Little memory", about, results["speed"]["stages"]),)
    title = "How many requests fit into the same memory"
    return Report(title, _lead(memory), sections, footer, dict(results), overview)


def split_table(memory: Mapping[str, Any]) -> Table:
    """The split in percent of capacity, one row per system, and the share of allocated memory that is used."""
    kinds = ("token_states", "reservation", "internal", "external", "rest")
    rows = [
        [
            label,
            *(f"{100 * figures['kv']['split'][kind]:.1f}" for kind in kinds),
            f"{100 * figures['kv']['efficiency']:.1f}",
        ]
        for label, figures in memory.items()
    ]
    columns = (
        "system",
        "token states, %",
        "reservation",
        "internal",
        "external",
        "rest",
        "used of allocated",
    )
    return Table(columns, rows)


def split_picture(memory: Mapping[str, Any]) -> Picture:
    """The split as stacked bars, with its text equivalent."""
    splits = {label: Split(**figures["kv"]["split"]) for label, figures in memory.items()}
    words = "; ".join(f"{label} {100 * split.token_states:.1f}" for label, split in splits.items())
    return Picture(
        "split", memory_bars(splits), f"Share of KV memory that holds token states, percent: {words}"
    )


def memory_per_token(memory: Mapping[str, Any]) -> int:
    """Bytes of one token's K/V."""
    per_token: int = next(iter(memory.values()))["kv"]["bytes_per_token"]
    return per_token


def _lead(memory: Mapping[str, Any]) -> str:
    labels = list(memory)
    first, last = labels[0], labels[-1]
    peak = {label: figures["running"]["peak"] for label, figures in memory.items()}
    used = 100 * memory[last]["kv"]["efficiency"]
    if first == last:
        return f"{last}: at most {peak[last]} requests; {used:.1f} % of what it allocates holds token states."
    more = f"{peak[last] / peak[first]:.1f} times as many"
    return (
        f"In the same memory {last} holds up to {peak[last]} requests, {first} {peak[first]} ({more}); "
        f"{used:.1f} % of what it allocates holds token states."
    )


def _residents(memory: Mapping[str, Any]) -> Table:
    rows = [
        [
            label,
            f"{figures['running']['peak']}",
            f"{figures['running_while_others_wait']:.1f}",
            f"{figures['counters']['forwards']:,}",
            f"{figures['counters']['preemptions']:,}",
            f"{figures['computed_per_emitted']:.2f}",
        ]
        for label, figures in memory.items()
    ]
    columns = ("system", "requests in, peak", "mean while others wait", "forwards", "preemptions",
               "computed per token")  # fmt: skip
    return Table(columns, rows)


def _sweep(results: Mapping[str, Any]) -> Table:
    speeds = results["speed_by_block_size"]["stages"]
    rows = [
        [
            size,
            f"{100 * figures['kv']['efficiency']:.1f}",
            f"{figures['running']['peak']}",
            f"{figures['running_while_others_wait']:.1f}",
            f"{figures['counters']['preemptions']:,}",
            f"{speeds[size]['median']['output_tok_s']:.1f}",
            f"{speeds[size]['min']['output_tok_s']:.1f}..{speeds[size]['max']['output_tok_s']:.1f}",
        ]
        for size, figures in results["block_sizes"].items()
    ]
    columns = ("tokens per block", "used of allocated, %", "requests in, peak", "mean while others wait",
               "preemptions", "tok/s, real model", "range")  # fmt: skip
    return Table(columns, rows)


def _speed(stages: Mapping[str, Any]) -> Table:
    first = next(iter(stages.values()))["median"]["output_tok_s"]
    rows = []
    for label, figures in stages.items():
        speed = figures["median"]["output_tok_s"]
        low, high = figures["min"]["output_tok_s"], figures["max"]["output_tok_s"]
        running = figures["median"]["running"]
        rows.append([label, f"{speed:.1f}", f"{low:.1f}..{high:.1f}", f"{speed / first:.2f}x",
                     f"{running['peak']:.0f}", f"{running['mean']:.1f}"])  # fmt: skip
    columns = ("system", "output tok/s", "range", "vs first row", "requests in, peak", "mean")
    return Table(columns, rows)
