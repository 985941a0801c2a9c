"""The report of `sixstage bench peers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bench.environment import describe
from common.bench.peers.figures import advantage
from common.bench.peers.overview import overview
from common.bench.peers.workloads import WORKLOADS
from common.bench.report import Picture, Report, Section, Table, human_bytes
from common.course.pictures.peers import peer_bars

HOW = (
    "Medians, with the least and the greatest of the runs where there are several. Every run is a process of its "
    "own; before the run that counts, it serves other requests of the same lengths. All engines get the same token "
    "ids, answer with the same number of tokens (checked), and use the same cores; rounds go forwards and backwards in "
    "turn. W1, W2 and W4 count answer tokens per second from the requests' arrival to the last token; W3 the time per "
    "token after the first; W5 the time to the first token. 'Cut off' is a run that took longer than {limit:.0f} s, "
    "with the speed that it had reached; it is compared with nobody."
)
VERSUS = (
    "How many times better the best of ours is than the best peer: "
    "of those with weights of the same width, and of all."
)
FIRST = "Seconds to the first token, median and 95th percentile over the requests: what a user waits in that crowd."
FLOOR = (
    "A lone user's next token needs every weight once: {bytes} at the {gigabytes:.1f} GB/s that this machine reads "
    "take {read:.1f} ms, and the linear layers alone, in the fastest way known here, took {linear:.1f} ms."
)


def peers_report(results: Mapping[str, Any]) -> Report:
    """Put what `common.bench.peers.command.run` returns into a report."""
    env, floor = results["environment"], results["floor"]
    versus = _versus_rows(results)
    how = [HOW.format(limit=env["limit"])]
    if floor is not None:
        how.append(_floor_text(floor))
    sections = [
        Section("Speed", how, _speed(results), (_picture(results),)),
        Section("Ours against the best peer", (VERSUS,), _versus_table(versus)),
        Section("Waiting for the first token", (FIRST,), _waiting(results)),
        Section("Who took part", (), _contenders(results)),
        Section("Where it loses", _losses(versus)),
    ]
    footer = (
        f"{env['model']}, {env['dtype']}, {human_bytes(env['kv_bytes'])} of KV memory, at most {env['max_num_seqs']} "
        f"sequences at once, {env['warm']} runs of warming up and {env['runs']} measured"
        f"{', cut down (--quick)' if env['quick'] else ''}. {describe(env)}."
    )
    title = "Beside other engines"
    return Report(title, _lead(versus), sections, footer, dict(results), overview(results))


def _floor_text(floor: Mapping[str, float]) -> str:
    return FLOOR.format(
        bytes=human_bytes(floor["weight_bytes"]),
        gigabytes=floor["read_bytes_per_second"] / 1e9,
        read=floor["read_ms"],
        linear=floor["linear_ms"],
    )


def _value(cell: Mapping[str, Any], workload: str) -> float | None:
    """The median of a workload's own figure; None if there is none to compare."""
    return cell["median"][WORKLOADS[workload].headline.figure] if "median" in cell else None


def _cell_text(cell: Mapping[str, Any] | None, workload: str) -> str:
    if cell is None:
        return "missing"
    if "failed" in cell:
        return "failed"
    if "cut_off" in cell:
        cut = cell["cut_off"]
        return f"cut off ({cut['tokens'] / cut['seconds']:.0f} tok/s)" if cut["tokens"] else "cut off"
    figure = WORKLOADS[workload].headline.figure
    values = [run[figure] for run in cell["runs"]]
    form = ".0f" if min(values) >= 100 else ".1f" if min(values) >= 10 else ".2f"
    text = f"{cell['median'][figure]:{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}}..{max(values):{form}})"


def _speed(results: Mapping[str, Any]) -> Table:
    workloads = results["workloads"]
    columns = ["engine", "weights", *(f"{name}, {about['unit']}" for name, about in workloads.items())]
    rows = [
        [name, one["dtype"], *(_cell_text(results["cells"][w].get(name), w) for w in workloads)]
        for name, one in results["contenders"].items()
    ]
    if results["floor"] is not None:
        read = f"{results['floor']['read_ms']:.1f}"
        rows.append(["floor: reading the weights", "", *(read if w == "W3" else "" for w in workloads)])
    caption = "; ".join(f"{name}: {about['about']}" for name, about in workloads.items())
    return Table(columns, rows, caption)


def _best(
    results: Mapping[str, Any], workload: str, ours: bool, dtype: str | None = None
) -> tuple[str, float] | None:
    """(name, figure) of the best of one side; None if it has none."""
    headline = WORKLOADS[workload].headline
    found = [
        (name, value)
        for name, cell in results["cells"][workload].items()
        if results["contenders"][name]["ours"] == ours
        and dtype in (None, results["contenders"][name]["dtype"])
        and (value := _value(cell, workload)) is not None
    ]
    choose = max if headline.more_is_better else min
    return choose(found, key=lambda pair: pair[1]) if found else None


Versus = tuple[str, tuple[str, float], "tuple[str, float] | None", "tuple[str, float] | None"]
"""(workload, our best, the best peer of the same width, the best of all)."""


def _versus_rows(results: Mapping[str, Any]) -> list[Versus]:
    dtype, rows = results["environment"]["dtype"], []
    for workload in results["workloads"]:
        ours = _best(results, workload, ours=True)
        if ours is not None:
            same, any_peer = _best(results, workload, False, dtype), _best(results, workload, False)
            rows.append((workload, ours, same, any_peer))
    return rows


def _times(workload: str, ours: tuple[str, float], peer: tuple[str, float] | None) -> float | None:
    return None if peer is None else advantage(ours[1], peer[1], WORKLOADS[workload].headline)


def _versus_table(versus: list[Versus]) -> Table:
    rows = []
    for workload, ours, *peers in versus:
        row = [workload, f"{ours[0]} {ours[1]:.4g}"]
        for peer in peers:
            times = _times(workload, ours, peer)
            row += (
                ["none", ""]
                if peer is None or times is None
                else [f"{peer[0]} {peer[1]:.4g}", f"{times:.2f}x"]
            )
        rows.append(row)
    columns = ("workload", "our best", "best peer, same width", "ours is", "best peer of all", "ours is")
    return Table(columns, rows)


def _waiting(results: Mapping[str, Any]) -> Table:
    rows = []
    for name in results["contenders"]:
        row = [name]
        for workload in results["workloads"]:
            runs = results["cells"][workload].get(name, {}).get("runs")
            middle = sorted(runs, key=lambda run: run["ttft_s"])[len(runs) // 2] if runs else None
            row.append("" if middle is None else f"{middle['ttft']['p50']:.2f} / {middle['ttft']['p95']:.2f}")
        rows.append(row)
    return Table(["engine", *results["workloads"]], rows)


def _contenders(results: Mapping[str, Any]) -> Table:
    rows = []
    for name, one in results["contenders"].items():
        versions = ", ".join(f"{p} {v}" for p, v in results["versions"].get(name, {}).items())
        failed = [
            f"{workload}: {cells[name]['failed']}"
            for workload, cells in results["cells"].items()
            if "failed" in cells.get(name, {})
        ]
        trouble = [f"missing: {results['missing'][name]}"] if name in results["missing"] else failed
        rows.append([name, one["about"], versions, "; ".join(trouble)])
    return Table(("engine", "what", "versions", "trouble"), rows)


def _lead(versus: list[Versus]) -> str:
    parts = []
    for workload, ours, _, peer in versus:
        times = _times(workload, ours, peer)
        if peer is not None and times is not None:
            parts.append(f"{workload} {times:.2f}x {peer[0]}")
    return (
        "The best of ours against the best peer: " + ", ".join(parts) + "."
        if parts
        else "No peer to compare with."
    )


def _losses(versus: list[Versus]) -> list[str]:
    """One sentence per workload in which a peer is ahead."""
    lost = [
        f"{workload}: {peer[0]} is ahead of {ours[0]}, {peer[1]:.4g} against {ours[1]:.4g} "
        f"{WORKLOADS[workload].headline.unit}."
        for workload, ours, _, peer in versus
        if peer is not None and advantage(ours[1], peer[1], WORKLOADS[workload].headline) < 1
    ]
    return lost or ["In none of the workloads measured here was a peer ahead of the best of ours."]


def _picture(results: Mapping[str, Any]) -> Picture:
    bars = {
        f"{workload}, {about['unit']}": {
            name: value
            for name, cell in results["cells"][workload].items()
            if (value := _value(cell, workload)) is not None
        }
        for workload, about in results["workloads"].items()
    }
    ours = {name for name, one in results["contenders"].items() if one["ours"]}
    words = "; ".join(
        f"{title}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        for title, values in bars.items()
    )
    caption = "Stages in their own colours, peers in grey. Who was cut off has no bar."
    return Picture("speed", peer_bars(bars, ours), words, caption, on_page=False)
