"""Getting a peer ready: its packages in a folder of the user's cache, and the model in the form that it reads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from common.bench.peers.registry import Contender, Environment
from common.errors import SixstageError
from common.model.cache import Say, build_once
from common.model.fetch import DEFAULT_MODEL

RUNNERS = Path(__file__).parent / "runners"


class PeerMissing(SixstageError):
    """A peer cannot take part here; one line that says why."""


def prepare(
    name: str, peer: Contender, model: str, folder: Path, dtype: str, report: Say
) -> tuple[Path, str]:
    """Make what a contender needs, or find it made.

    Args:
        name: of the contender.
        peer: who.
        model: as the user named it.
        folder: the model's, in the Hugging Face layout.
        dtype: to compute in.
        report: takes lines of progress.

    Returns:
        (its Python, the path of the model to load).

    Raises:
        PeerMissing: it cannot be had.
        ModelError: the cache cannot be written.
    """
    if peer.only_default and model != DEFAULT_MODEL:
        raise PeerMissing(f"it is only set up for {DEFAULT_MODEL}")
    if peer.environment is None:
        return Path(sys.executable), str(folder)
    python = make_environment(peer.environment, report)
    if not peer.weights:
        return python, str(folder)
    weights = peer.weights.get(dtype)
    if weights is None:
        raise PeerMissing(f"it does not compute in {dtype}")
    report(f"{name}: converting the model to {weights}")
    mark = _hash(str(folder.resolve()), peer.runner, weights)

    def build(scratch: Path) -> None:
        command = [str(python), str(RUNNERS / peer.runner), str(folder), str(scratch), weights]
        _do(command, "its model cannot be converted")

    return python, str(build_once(f"peer-model-{peer.environment.name}-{weights}-{mark}", build, report))


def make_environment(wanted: Environment, report: Say) -> Path:
    """A virtual environment with a peer's packages, made once; returns its Python.

    Raises:
        PeerMissing: pip cannot install them.
        ModelError: the cache cannot be written.
    """
    packages = (*wanted.packages, *wanted.files)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = f"peer-{wanted.name}-{_hash(version, *packages)}"

    def build(scratch: Path) -> None:
        report(f"{wanted.name}: installing {' '.join(packages)} (minutes, once)")
        _do([sys.executable, "-m", "venv", str(scratch)], "no virtual environment can be made")
        pip = [str(_python_of(scratch)), "-m", "pip", "--disable-pip-version-check"]
        failed = "cannot be installed" + (f" ({wanted.hint})" if wanted.hint else "")
        _do([*pip, "install", *wanted.packages], failed)
        if wanted.files:
            _do([*pip, "install", "--no-deps", *wanted.files], failed)
        if wanted.remove:
            _do([*pip, "uninstall", "--yes", *wanted.remove], failed)

    return _python_of(build_once(folder, build, report))


def child_environment(isolated: bool, threads: int) -> dict[str, str]:
    """Environment variables of a runner: the same number of threads for everybody's libraries.

    Args:
        isolated: the runner has packages of its own, and must not see ours.
        threads: to compute with.
    """
    left_out = {"PYTHONPATH", "PYTHONHOME"} if isolated else set()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | dict.fromkeys(names, str(threads))


def _python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _do(command: list[str], failed: str) -> None:
    """Run a command whose words matter only if it fails."""
    environment = child_environment(isolated=True, threads=os.cpu_count() or 1)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = errors[-1] if errors else f"exit code {done.returncode}"
        raise PeerMissing(f"{failed}: {reason[:300]}")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
