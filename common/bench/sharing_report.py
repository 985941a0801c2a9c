"""The report of `sixstage bench sharing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.bench.report_multiples import multiples
from common.bench.sharing_beams import PAPER_BEAMS, UNCACHED
from common.bench.sharing_counts import PAPER_SAMPLES

AGENTS = (
    "All agents begin with one system prompt of {system} tokens, and each turn's prompt is the whole conversation so "
    "far. Prompt tokens computed: those that went through the model and were not an answer's; what is preempted "
    "counts again. KV held: blocks that somebody holds, each once."
)
FIRST = (
    "Two requests with one system prompt of 1,000 tokens and 32 tokens of their own, one after the other, nothing "
    "else to do. The second one finds the first one's blocks."
)
READING = (
    "Sixteen sequences decode behind one prefix. 'Always' reads it once per step for all of them, 'never' once for "
    "each; the stage chooses by what it would save. The rule changes from step to step, so all see the same load."
)
CHAT = (
    "Real conversations from ShareGPT, sixteen at a time, counted without a model: all that was said before is in "
    "the next prompt. The ideal follows from the counts alone: every full block of the turn before. With less "
    "memory than the conversations need, blocks are evicted before their next turn comes."
)
SAMPLES = (
    "Blocks that n answers to one prompt need not hold, over all forwards, counted by the stage's own allocator. s "
    "is the share of all blocks that the prompts' full blocks would make up; n answers share them, so s (1 - 1/n) "
    "is saved. Prompts of 'alpaca' have the paper's mean lengths, in a shape of ours."
)
BEAM_BLOCKS = (
    "The same for beams, over the real model and real questions: short is one question, long all of them at once. "
    "Beams share what they have in common of their answers, too."
)
BEAM_WAYS = (
    "Two searches at a time. Fork: beams are sequences of the engine, and go on in their parents' blocks. Resubmit: "
    "every step sends every beam as a new request; the cache finds its full blocks, and what is left of the last "
    "one is computed again. tok/s counts the best answers' tokens."
)
HASHING = (
    "Prompts that have nothing in common: every block is hashed, looked for and published, and nothing is ever "
    "found. Finding and publishing took {hash_ms:.1f} ms of {run_s:.1f} s, {share:.3%} of the time of all {steps:.0f} "
    "steps."
)
LOSES = (
    "Where no two prompts begin alike, the cache finds nothing and costs what the section before says. Where memory "
    "is shorter than the time between two turns is long, it evicts what would have been asked for (the first rows "
    "of the table of conversations). A parallel sample shares its prompt only: long answers to short prompts save "
    "little. And a request whose beginning is just being computed waits for it, a step or a few, and all behind it do."
)


def sharing_report(
    results: Mapping[str, Any], tree: Picture, copy: Picture, beams: Picture | None = None
) -> Report:
    """Put what `common.bench.sharing.run` returns, and the pictures of tree, copy and beams, into a report."""
    env, hashing = results["environment"], results["hashing"]
    sections = [
        Section("What the blocks make", pictures=(tree,)),
        Section(
            "Agents", (AGENTS.format(system=env["longest"] or "1,000"),), _agents(results["agents"]["stages"])
        ),
        Section("The first token", (FIRST,), _first(results["first_token"])),
        Section("A prefix read once", (READING,), _reading(results["prefix_reading"])),
        Section("Conversations", (CHAT,), _chat(results["chat"])),
        Section("Copy-on-write", pictures=(copy,)),
        Section("Parallel samples", (SAMPLES,), _samples(results["samples"])),
        Section("Beams", (BEAM_BLOCKS,), _beam_blocks(results["beam_blocks"]), [beams] if beams else ()),
        Section("Beam search in two ways", (BEAM_WAYS,), _beam_ways(results["beam_ways"])),
        Section("The cost of hashing", (HASHING.format(hash_ms=1e3 * hashing["hash_s"], **hashing),)),
        Section("Where it loses", (LOSES,)),
    ]
    footer = (
        f"{env['num_requests']} turns of agents, at most {env['max_num_seqs']} sequences at once, "
        f"{human_bytes(env['kv_bytes'])} of KV memory, {env['model']}, {env['dtype']}. {describe(env)}. "
        f"Trace sha256 {env['trace_hash'][:16]}."
    )
    about = f"{env['num_requests']} turns, at most {env['max_num_seqs']} sequences at once."
    overview = (multiples("Agents", about, results["agents"]["stages"]),)
    return Report("Equal blocks, held once", _lead(results), sections, footer, dict(results), overview)


def prompt_tokens_computed(figures: Mapping[str, Any]) -> float:
    """Tokens that went through the model and were no answer's, but for a first one nobody had computed."""
    counters = figures["counters"]
    computed: float = counters["tokens_computed"] - (
        counters["tokens_emitted"] - counters["sequences_finished"]
    )
    return computed


def _lead(results: Mapping[str, Any]) -> str:
    stages = {label: stage["median"] for label, stage in results["agents"]["stages"].items()}
    first, *_, last = [*stages, *stages]
    warm = results["first_token"][last]["warm_share"]
    if first == last:
        return f"With {last} a warm request has its first token after {warm:.1%} of a cold one's time."
    fewer = prompt_tokens_computed(stages[first]) / prompt_tokens_computed(stages[last])
    faster = stages[last]["output_tok_s"] / stages[first]["output_tok_s"]
    return (
        f"On agents {last} computes {fewer:.1f} times fewer prompt tokens than {first} and gives {faster:.1f} "
        f"times the tokens per second; a warm request has its first token after {warm:.1%} of a cold one's time."
    )


def _agents(stages: Mapping[str, Any]) -> Table:
    rows = []
    for label, stage in stages.items():
        figures = stage["median"]
        rows.append([
            label,
            f"{prompt_tokens_computed(figures):,.0f}",
            f"{human_bytes(figures['kv']['reserved_bytes']['mean'])}",
            f"{human_bytes(figures['kv']['reserved_bytes']['peak'])}",
            f"{figures['ttft_s']['p50']:.2f} / {figures['ttft_s']['p95']:.2f} s",
            f"{figures['output_tok_s']:.1f}",
            f"{stage['min']['output_tok_s']:.1f}..{stage['max']['output_tok_s']:.1f}",
        ])  # fmt: skip
    columns = (
        "stage",
        "prompt tokens computed",
        "KV held, mean",
        "peak",
        "TTFT p50 / p95",
        "output tok/s",
        "range",
    )
    return Table(columns, rows)


def _first(by_label: Mapping[str, Any]) -> Table:
    rows = [
        [label, f"{1e3 * f['cold_s']:.0f} ms", f"{1e3 * f['warm_s']:.0f} ms", f"{f['warm_share']:.1%}"]
        for label, f in by_label.items()
    ]
    return Table(("stage", "TTFT cold", "TTFT warm", "warm / cold"), rows)


def _reading(found: list[dict[str, Any]]) -> Table:
    rules = list(found[0]["step_s"])
    rows = [
        [f"{row['prefix_tokens']:,}", *(f"{1e3 * row['step_s'][rule]:.1f} ms" for rule in rules),
         "once" if row["chosen"] else "each"]
        for row in found
    ]  # fmt: skip
    return Table(("shared tokens", *(f"step, {rule}" for rule in rules), "the stage reads it"), rows)


def _chat(chat: Mapping[str, Any]) -> Table:
    rows = [
        [f"{int(budget):,}", f"{figures['hit_rate']:.1%}", f"{figures['evictions']:,}", f"{figures['preemptions']:,}",
         f"{figures['tokens_computed']:,}"]
        for budget, figures in chat["by_budget"].items()
    ]  # fmt: skip
    rows.append(["ideal, whole blocks", f"{chat['ideal']:.1%}", "", "", ""])
    rows.append(["ideal, every token", f"{chat['ideal_by_token']:.1%}", "", "", ""])
    return Table(("KV memory, tokens", "hit rate", "evictions", "preemptions", "tokens computed"), rows)


def _samples(samples: Mapping[str, Any]) -> Table:
    rows = [
        [f"{name}, n = {n}", f"{found['saved']:.2%}", f"{found['closed_form']:.2%}", f"{of['shared']:.1%}",
         _percent(PAPER_SAMPLES.get(name, {}).get(int(n)))]
        for name, of in samples.items()
        for n, found in of["by_n"].items()
    ]  # fmt: skip
    return Table(("workload", "saved", "s (1 - 1/n)", "s", "paper"), rows)


def _beam_blocks(blocks: Mapping[str, Any]) -> Table:
    rows = [
        [f"{name}, width {width}", f"{of['prompt_tokens']:.0f}", f"{of['answer_tokens']}", f"{saved:.1%}",
         _percent(PAPER_BEAMS[name].get(int(width)))]
        for name, of in blocks.items()
        for width, saved in of["by_width"].items()
    ]  # fmt: skip
    return Table(("searches", "prompt tokens", "answer tokens", "saved", "paper"), rows)


def _beam_ways(rows: list[dict[str, Any]]) -> Table:
    table = []
    for row in rows:
        fork, again = row["ways"]["fork"], row["ways"]["resubmit"]
        uncached = row["ways"].get(UNCACHED)
        table.append([
            f"{row['width']}",
            f"{row['prompt_tokens']} + {row['answer_tokens']}",
            f"{row['block_size']}",
            f"{fork['tok_s']:.1f}",
            f"{again['tok_s']:.1f}",
            "" if uncached is None else f"{uncached['tok_s']:.1f}",
            f"{fork['tokens_computed']:,.0f} / {again['tokens_computed']:,.0f}",
            f"{fork['copies']:.0f}",
        ])  # fmt: skip
    columns = ("width", "prompt + answer", "block size", "fork, tok/s", "resubmit, tok/s", "without a cache",
               "computed, fork / resubmit", "block copies")  # fmt: skip
    return Table(columns, table)


def _percent(text: str | None) -> str:
    return "" if text is None else f"{text} %"
