"""The demo's report: tables, pictures and words made of the recorded figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.record import Run
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.bench.report_multiples import multiples
from common.course.pictures import memory_map, slot_timeline, throughput_bars

Figures = Mapping[str, Any]
"""One stage's figures, as `common.bench.metrics.summarise` gives them."""

SPEED = (
    "One row per stage, each with all chats waiting at the start. Computed per token: tokens that went "
    "through the model for each token of an answer, prompts included. First token: how long a chat waits "
    "for the first word of its answer."
)
MEMORY = (
    "Reserved is memory that nobody else can use; live is memory that holds a token of an unfinished "
    "chat. Peak and mean are over forwards. In pictures each colour is one chat: full colour is live, "
    "hatched is set aside and does nothing, blank is free."
)
PLACES = "Each row is a place in the batch, each colour one chat, each unit to the right one forward."
CHATS = (
    "The default model is very small: its answers are fluent and sometimes wrong. What matters here is "
    "that every stage gives the same ones. Long answers are cut at the limit."
)
PARTED = (
    "Not all. These are the chats whose answer differs from the first stage's, with the number of tokens "
    "that both have in common and the gap between the logits of the two tokens that follow, recomputed by "
    "the first stage on its own (so rounding may turn its sign). In half precision a small gap is a near "
    "tie that rounding decides; a large one, or any in float32, would be a fault."
)


def demo_report(results: Mapping[str, Any], runs: Mapping[str, Run] | None = None) -> Report:
    """Put the demo's results into a report.

    Args:
        results: what `common.bench.demo.run` returns; a file's may lack `events`, and have nothing to step through.
        runs: stage -> its record, for the pictures beside the Markdown; the page draws `events`.
    """
    runs = runs or {}
    stages, env = results["stages"], results["environment"]
    maps = [_memory_picture(name, run) for name, run in runs.items()]
    places = [_places_picture(name, run) for name, run in runs.items()]
    chats = [(chat["prompt"], chat["answer"]) for chat in results["chats"]]
    steps = results.get("events", {})
    sections = [
        Section("Speed", (SPEED,), speed_table(stages), (speed_picture(stages),)),
        _sameness(results),
        Section("KV memory", (MEMORY,), memory_table(stages), maps),
        *([Section("Who sits where in the batch", (PLACES,), pictures=places, runs=steps)] if steps else []),
        Section("The chats", (CHATS,), folded=chats),
    ]
    footer = (
        f"{env['model']}, {env['dtype']}, {human_bytes(env['kv_bytes'])} of KV memory, at most "
        f"{env['max_num_seqs']} chats in a batch, answers of at most {env['max_tokens']} tokens, greedy. "
        f"{describe(env)}. One run per stage, in one process; 'sixstage bench' repeats, in fresh processes."
    )
    budget = f"{len(chats)} real chats, {human_bytes(env['kv_bytes'])} of KV memory, one run of each stage."
    overview = (multiples("Chats", budget, stages),)
    title = "The same chats through every stage"
    return Report(title, _lead(results), sections, footer, dict(results), overview)


def speed_table(stages: Mapping[str, Figures]) -> Table:
    """Speed and counters, one row per stage."""
    columns = ("stage", "tok/s", "vs stage before", "vs first stage", "first token, mean", "first token, p95",
               "forwards", "computed per token")  # fmt: skip
    speeds = [figures["output_tok_s"] for figures in stages.values()]
    rows = [
        [
            name,
            f"{speeds[row]:.1f}",
            f"{speeds[row] / speeds[row - 1]:.2f}x" if row else "",
            f"{speeds[row] / speeds[0]:.2f}x" if row else "",
            f"{figures['ttft_s']['mean']:.2f} s",
            f"{figures['ttft_s']['p95']:.2f} s",
            f"{figures['counters']['forwards']:,}",
            f"{figures['computed_per_emitted']:.1f}",
        ]
        for row, (name, figures) in enumerate(stages.items())
    ]
    return Table(columns, rows)


def memory_table(stages: Mapping[str, Figures]) -> Table:
    """KV memory reserved and live, one row per stage."""
    cells = [(kind, when) for kind in ("reserved_bytes", "live_bytes") for when in ("peak", "mean")]
    rows = []
    for name, figures in stages.items():
        kv = figures["kv"]
        if kv is None:
            rows.append([name, *["none"] * 4, ""])
            continue
        share = kv["live_bytes"]["mean"] / kv["reserved_bytes"]["mean"]
        rows.append([name, *(human_bytes(kv[kind][when]) for kind, when in cells), f"{share:.0%}"])
    columns = ("stage", "reserved, peak", "reserved, mean", "live, peak", "live, mean", "live of reserved")
    return Table(columns, rows)


def speed_picture(
    stages: Mapping[str, Figures], spread: Mapping[str, tuple[float, float]] | None = None
) -> Picture:
    """Throughput bars with their text equivalent."""
    speeds = {name: figures["output_tok_s"] for name, figures in stages.items()}
    words = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
    words = f"Output tokens per second: {words}"
    return Picture("throughput", throughput_bars(speeds, spread), words, on_page=False)


def _lead(results: Mapping[str, Any]) -> str:
    stages = results["stages"]
    first, last = next(iter(stages)), next(reversed(stages))
    ratio = stages[last]["output_tok_s"] / stages[first]["output_tok_s"]
    speed = f"{last} is {ratio:.1f} times as fast as {first}. " if first != last else ""
    budget = human_bytes(results["environment"]["kv_bytes"])
    count = len(results["partings"])
    same = (
        "every stage gave the same answers, token for token."
        if results["identical"]
        else f"{count} of their answers part from the first stage's; see below where."
    )
    return f"{speed}{len(results['chats'])} real chats, one KV budget of {budget}: {same}"


def _sameness(results: Mapping[str, Any]) -> Section:
    heading, chats = "Are the answers the same?", results["chats"]
    if results["identical"]:
        count = len(results["stages"])
        return Section(heading, (f"Yes: the same tokens from {count} stages for all {len(chats)} chats.",))
    rows = [
        [
            chats[int(parting["request_id"])]["prompt"],
            parting["stage"],
            str(parting["position"]),
            "one ended" if parting["gap"] is None else f"{parting['gap']:.4f}",
        ]
        for parting in results["partings"]
    ]
    return Section(heading, (PARTED,), Table(("chat", "stage", "tokens in common", "logit gap"), rows))


def _memory_picture(name: str, run: Run) -> Picture:
    peak = max((step.usage.reserved for step in run.steps), default=0)
    capacity = run.steps[0].usage.capacity if run.steps else 0
    alt = f"{name}: KV memory over {len(run.steps)} forwards; at most {peak} of {capacity} slots reserved"
    return Picture(f"memory-{name}", memory_map(run, name), alt, on_page=False)


def _places_picture(name: str, run: Run) -> Picture:
    stats = run.stats
    busy = 1 - stats.idle_slot_steps / stats.slot_steps if stats.slot_steps else 0.0
    alt = f"{name}: {stats.forwards} forwards, {busy:.0%} of {run.max_num_seqs} places busy"
    figure = slot_timeline(run, f"{name}: {busy:.0%} of places busy")
    return Picture(f"places-{name}", figure, alt, on_page=False)
