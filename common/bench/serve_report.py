"""The report of `sixstage bench serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.course.pictures import latency_curves

CURVES = (
    "Requests come one by one at random, whatever has become of those before. The normalised latency is the time "
    "from a request's arrival to its end, over the tokens of its answer, averaged over the requests: the figure of "
    "the PagedAttention paper's evaluation. A stage that keeps up answers at about the speed of a lone request; where "
    "its queue begins to grow, the curve turns up. A curve ends at {limit:g} s per token, or where the client, "
    "{patience} after the last arrival, gave requests up; their time until then is counted, which is less than they "
    "would have taken. 'offline' is {newest}'s engine with the same requests at the same times and no server around it."
)
OVERHEAD = (
    "{requests} requests, all there from the start, at most {places} at a time: once to the engine itself, once over "
    "HTTP with a stream for each. The difference is what JSON, tokens to text, the event loop, its thread beside the "
    "engine's and the client on the same processor take together; the client alone takes {client:.0f} µs of a core's "
    "time per token, which is {share:.1%} of a core."
)
AGENTS = (
    "{agents} agents come one by one. All begin with the same system prompt of {system:,} tokens, and each turn sends "
    "its whole conversation again; until the last turn the model is made to call a tool, whose result opens the next. "
    "Cached tokens are those of the prompt that were found in the prefix cache, as the answer's usage reports them."
)
LOSES = (
    "At low rates all stages that remember K/V look alike: a lone request runs alone in any of them. And a server adds "
    "to every first token what HTTP and the queue take, which an offline batch never pays."
)
QUANTILES = ("p50", "p95", "p99")


def serve_report(results: Mapping[str, Any]) -> Report:
    """Put what `common.bench.serve.run` returns into a report."""
    env, curves, agents = results["environment"], results["curves"], results["agents"]
    newest = env["stage"][-1]
    text = CURVES.format(
        limit=results["limit_s_per_token"], patience=f"{results['patience_s']:.0f} s", newest=newest
    )
    goal = results["goal"]
    about = (
        f"Goodput counts requests with a first token within {goal['ttft_s']:g} s and at most {goal['tpot_s']:g} s per "
        "further token: about as fast as people read."
    )
    found = results["overhead"]
    client = found["client_s_per_token"]
    overhead = OVERHEAD.format(
        requests=found["requests"],
        places=env["max_num_seqs"],
        client=1e6 * client,
        share=client * found["median_tok_s"]["http"],
    )
    work = AGENTS.format(
        agents=results["agents_asked"]["agents"], system=results["agents_asked"]["system_tokens"]
    )
    sections = [
        Section("Latency against rate", (text, about), _curve_table(curves), (_picture(curves, results),)),
        Section("What the server costs", (overhead,), _overhead_table(found)),
        Section("Agents", (work,), _agent_table(agents)),
        Section("Where it loses", (LOSES,)),
    ]
    footer = (
        f"Workload '{env['workload']}', prompts and answers cut to {env['longest']} tokens, at most "
        f"{env['max_num_seqs']} at once, {human_bytes(env['kv_bytes'])} of KV memory, {env['model']}, {env['dtype']}. "
        f"{describe(env)}. Trace sha256 {env['trace_hash'][:16]}."
    )
    return Report("Served over HTTP", _lead(results, newest), sections, footer, dict(results))


def _lead(results: Mapping[str, Any], newest: str) -> str:
    best = {name: max(point["goodput_rps"] for point in curve) for name, curve in results["curves"].items()}
    others = ", ".join(f"{name} {rate:.2f}" for name, rate in best.items() if name not in (newest, "offline"))
    cached = results["agents"]["all"]["cached_share"]
    return (
        f"The server takes {results['overhead']['overhead']:.1%} of the engine's speed. {newest} serves up to "
        f"{best[newest]:.2f} requests per second well ({others}), and {cached:.0%} of the agents' prompt tokens come "
        "from the cache."
    )


def _picture(curves: Mapping[str, Any], results: Mapping[str, Any]) -> Picture:
    words = "; ".join(
        f"{name}: {curve[0]['latency_s_per_token']:.2f} s per token at {curve[0]['rate']:.2f} requests per second, "
        f"{curve[-1]['latency_s_per_token']:.2f} s at {curve[-1]['rate']:.2f}"
        for name, curve in curves.items()
    )
    return Picture("latency", latency_curves(curves, results["limit_s_per_token"]), words)


def _curve_table(curves: Mapping[str, Any]) -> Table:
    rows = [
        [
            name,
            f"{point['rate']:.2f}",
            f"{point['finished']} / {point['requests']}",
            f"{point['goodput_rps']:.2f}",
            f"{point['output_tok_s']:.1f}",
            f"{1e3 * point['latency_s_per_token']:,.0f}",
            " / ".join(f"{point['ttft_s'][q]:.2f}" for q in QUANTILES),
            " / ".join(f"{1e3 * point['tpot_s'].get(q, 0.0):.0f}" for q in QUANTILES),
        ]
        for name, curve in curves.items()
        for point in curve
    ]
    columns = ("stage", "req/s", "finished", "good/s", "tok/s", "ms per token", "TTFT p50 / p95 / p99, s",
               "TPOT p50 / p95 / p99, ms")  # fmt: skip
    return Table(columns, rows)


def _overhead_table(overhead: Mapping[str, Any]) -> Table:
    rows = [
        [side, f"{overhead['median_tok_s'][side]:.1f}", f"{min(speeds):.1f}..{max(speeds):.1f}"]
        for side, speeds in overhead["output_tok_s"].items()
    ]
    return Table(("side", "output tok/s", "range"), rows, f"overhead {overhead['overhead']:.1%}")


def _agent_table(agents: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"turn {turn}" if turn != "all" else turn,
            f"{figures['requests']}",
            f"{figures['prompt_tokens']:,}",
            f"{figures['cached_tokens']:,}",
            f"{figures['cached_share']:.1%}",
            " / ".join(f"{figures['ttft_s'][q]:.2f}" for q in QUANTILES) + " s",
        ]
        for turn, figures in agents.items()
    ]
    columns = ("turn", "requests", "prompt tokens", "cached", "share", "TTFT p50 / p95 / p99")
    return Table(columns, rows)
