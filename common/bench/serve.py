"""`sixstage bench serve`: what users of a server feel, and what the server itself costs.

Three experiments with the real server in a process of its own, the client in another:

* **Overhead**: the same requests, all at once, through HTTP and through the engine alone.
* **Latency against rate**: requests that come at random, ever more of them per second, for each stage; the
  picture of the PagedAttention paper's Fig. 12.
* **Agents**: twenty of them with one system prompt, calling a tool turn after turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, TypeAlias
from uuid import uuid4

import torch

from common.bench.arrivals import arrival_times
from common.bench.harness import new_console, pick_stages, progress
from common.bench.job import Job
from common.bench.report import publish
from common.bench.run_stage import rounds
from common.bench.serve_agents import agent_figures, run_agents
from common.bench.serve_client import Goal, Outcome, replay, serving_figures
from common.bench.serve_offline import offline_process
from common.bench.serve_process import ServerProcess, server_arguments, server_process
from common.bench.serve_report import serve_report
from common.bench.workloads import trace_hash
from common.errors import InvalidValue
from common.model.loader import read_config, resolve, resolve_dtype

OFFLINE = "offline"
MAX_MODEL_LEN = 4096  # the last turn of an agent fits
END = 600.0  # seconds after which requests that came at once are given up
LIMIT = 0.3  # seconds per token; where a curve passes it, it ends, as in the paper's figure
GOAL = Goal()

Serve: TypeAlias = Callable[[Job], list[Outcome]]
"""Does a job, by whatever way."""

OnRun: TypeAlias = Callable[[str], None]
"""Told what is being measured now."""


@dataclass(frozen=True)
class Scale:
    """How much of the experiment is done."""

    stages: tuple[int, ...] | None  # if none are asked for; None is all of them
    requests: int  # of the overhead's run, all at once
    runs: int  # of each side
    places: int
    longest: int  # prompts and answers are cut to this
    shares: tuple[float, ...]  # rates, as shares of what the newest stage serves when all come at once
    seconds: float  # for which requests come at each rate
    patience: float  # seconds after the last arrival, then the client gives up
    agents: int
    turns: int
    system: int  # tokens of the agents' system prompt


FULL = Scale(None, 32, 3, 16, 128, (0.15, 0.4, 0.65, 0.9, 1.15), 10.0, 10.0, 20, 5, 2000)
QUICK = Scale((2, 5), 6, 1, 4, 16, (0.3, 0.9), 2.0, 4.0, 3, 3, 200)


def run(
    stages: Iterable[str | int] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    kv_bytes: int = 512 << 20,
    max_num_seqs: int = 16,
    kernel: str = "auto",
    json: str | Path | None = None,
    quick: bool = False,
    out: str | Path = "reports",
) -> dict[str, Any]:
    """Serve over HTTP and measure from the client's side; print and save the report.

    Args:
        stages: names or numbers; None takes all of them.
        model: see `common.model.loader.resolve`.
        dtype: to compute in.
        kv_bytes: KV memory of each stage.
        max_num_seqs: places in a batch.
        kernel: attention kernel of the paged stages.
        json: write all figures to this file as well.
        quick: fewer stages, and fewer and shorter requests.
        out: folder for `serve.html`, `serve.md` and `serve.json`.

    Returns:
        What the JSON holds: environment, and the figures of `overhead`, `curves` and `agents`.

    Raises:
        SixstageError: a value or the model cannot be used, a run failed, a file cannot be written.
    """
    scale = QUICK if quick else FULL
    names, console = pick_stages(scale.stages if stages is None else stages), new_console()
    if names[-1] < "stage5":
        raise InvalidValue("stages", names, "at least one that shares prefixes (stage 5 on), for the agents")
    config, compute = read_config(resolve(model)), resolve_dtype(dtype, torch.device("cpu"))
    longest = min(MAX_MODEL_LEN, config.max_position_embeddings)
    base = Job(names[-1], model, dtype, num_requests=scale.requests, bound="exact", longest=scale.longest,
               kv_bytes=kv_bytes, max_model_len=longest, max_num_seqs=min(max_num_seqs, scale.places),
               kernel=kernel)  # fmt: skip
    base.engine_config()  # refuse a wrong value before anything is started
    results: dict[str, Any] = {
        "environment": base.environment(compute, trace_hash(base.trace(config.vocab_size)), names),
        "goal": asdict(GOAL),
        "limit_s_per_token": LIMIT,
        "patience_s": scale.patience,
        "agents_asked": {"agents": scale.agents, "turns": scale.turns, "system_tokens": scale.system},
    }
    with progress(console) as bars:
        bar = bars.add_task("serve", total=None, note="")
        measure = _Measure(scale, config.vocab_size, lambda what: bars.update(bar, advance=1, note=what))
        results |= measure.everything(base, names)
    report = serve_report(results)
    publish(report, console, out, "serve", json)
    return results


@dataclass(frozen=True)
class _Measure:
    """The three experiments, at one scale."""

    scale: Scale
    vocab_size: int
    on_run: OnRun

    def everything(self, base: Job, names: list[str]) -> dict[str, Any]:
        """The newest stage first: its speed sets the rates of all."""
        scale, curves = self.scale, {}
        with offline_process() as offline:
            with server_process(*server_arguments(base)) as server:
                self._warm_up(server, base)
                overhead = self._overhead(server, offline, base)
                rates = [share * overhead["capacity_rps"] for share in scale.shares]
                curves[base.stage] = self._climb(base, rates, partial(self._over_http, server))
                self.on_run(f"{scale.agents} agents")
                agents = agent_figures(run_agents(server.base, scale.agents, scale.turns, scale.system))
            curves[OFFLINE] = self._climb(base, rates, offline, OFFLINE)
        for name in names[:-1]:
            job = replace(base, stage=name)
            with server_process(*server_arguments(job)) as server:
                self._warm_up(server, job)
                curves[name] = self._climb(job, rates, partial(self._over_http, server))
        ordered = {name: curves[name] for name in (*names, OFFLINE)}
        return {"overhead": overhead, "curves": ordered, "agents": agents}

    def _warm_up(self, server: ServerProcess, job: Job) -> None:
        """What happens only once in a process (compilation, packing of weights) is not timed."""
        self.on_run(f"{job.stage}: warming up")
        self._over_http(server, replace(job, num_requests=2, longest=8))

    def _over_http(self, server: ServerProcess, job: Job) -> list[Outcome]:
        """Do a job by requests to the server."""
        trace = job.trace(self.vocab_size)
        arrivals = arrival_times(job.arrival, len(trace), job.rate, job.seed)
        patience = END if job.arrival == "at_once" else self.scale.patience
        return replay(server.base, trace, arrivals, patience, salt=uuid4().hex)

    def _overhead(self, server: ServerProcess, offline: Serve, job: Job) -> dict[str, Any]:
        """Both sides in turn, several times, as a machine's speed drifts."""
        sides: dict[str, Serve] = {OFFLINE: offline, "http": partial(self._over_http, server)}
        speed: dict[str, list[float]] = {side: [] for side in sides}
        client: list[float] = []  # its own processor time, seconds per token
        for number, side in rounds(list(sides), self.scale.runs):
            self.on_run(f"{side}: all at once, run {number + 1} of {self.scale.runs}")
            used = process_time()
            outcomes = sides[side](job)
            if side != OFFLINE:
                client.append((process_time() - used) / sum(one.tokens for one in outcomes))
            speed[side].append(serving_figures(outcomes, GOAL)["output_tok_s"])
        medians = {side: median(speeds) for side, speeds in speed.items()}
        tokens = sum(item.output_len for item in job.trace(self.vocab_size)) / self.scale.requests
        return {
            "requests": self.scale.requests,
            "output_tok_s": speed,
            "median_tok_s": medians,
            "overhead": 1 - medians["http"] / medians[OFFLINE],
            "capacity_rps": medians["http"] / tokens,
            "client_s_per_token": median(client),
        }

    def _climb(self, job: Job, rates: list[float], serve: Serve, label: str = "") -> list[dict[str, Any]]:
        """Figures at each rate, until one is more than the stage can serve."""
        curve = []
        for rate in rates:
            self.on_run(f"{label or job.stage}: {rate:.2f} requests per second")
            count = max(3, round(rate * self.scale.seconds))
            outcomes = serve(replace(job, num_requests=count, arrival="poisson", rate=rate))
            curve.append({"rate": rate, **serving_figures(outcomes, GOAL)})
            if curve[-1]["latency_s_per_token"] > LIMIT or curve[-1]["finished"] < count:
                break
        return curve
