"""Where and with what a figure was measured; every JSON carries it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "numpy", "numba", "triton")


def environment(**run: Any) -> dict[str, Any]:
    """Machine, software and commit, plus what the caller says about the run.

    Args:
        run: model, dtype, backend, kv_bytes, trace_hash and so on, copied as they are.
    """
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "commit": commit(),
        **run,
    }


def cpu_name() -> str:
    """The processor's name as its maker writes it, or the best that the platform knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor()
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Main memory of the machine; None where the platform does not say."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def peak_memory_bytes() -> int | None:
    """Most main memory that this process has held so far; None where the platform does not say (Windows)."""
    try:
        import resource  # noqa: PLC0415  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB everywhere else


def commit() -> str | None:
    """Commit of the checkout this runs from, with `+dirty` if files differ from it; None outside of one."""
    here = Path(__file__).resolve().parents[2]
    head = _output(["git", "-C", str(here), "rev-parse", "HEAD"])
    if not head:
        return None
    changed = _output(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return head + ("+dirty" if changed else "")


def describe(env: dict[str, Any]) -> str:
    """The environment in one line for people."""
    packages = env["packages"]
    commit = env["commit"]
    parts = [
        f"{env['cpu']}, {env['threads']} threads",
        f"Python {env['python']}",
        f"torch {packages['torch']}",
        f"commit {commit[:10]}{'+dirty' if commit.endswith('+dirty') else ''}" if commit else "no commit",
    ]
    return " · ".join(parts)


def _output(command: list[str]) -> str:
    """What a command prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
