"""The Triton kernels without a GPU: interpreted, and compiled ahead of time for three GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

HERE = Path(__file__).parent
LAUNCHES = ("store", "simple", "prompt", "prompt with lse", "decode", "split", "merge")
HEAD_SIZES = (64, 128, 256)
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Most bytes that one program can have."""


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """The files that judge all kernels, once more in processes where Triton interprets."""
    files = (
        "test_paged_attention.py",
        "test_triton_kernels.py",
        "test_shared_attention.py",
        "test_graphs.py",
    )
    children = [
        start(["-m", "pytest", str(HERE / file), "-q", "-p", "no:cacheprovider"], {"TRITON_INTERPRET": "1"})
        for file in files
    ]
    for (out, err), child in zip(outputs(children), children, strict=True):
        assert child.returncode == 0, out[-5000:] + err[-1000:]
        assert re.search(r"^\d\d+ passed", out, re.MULTILINE), out
        assert "skipped" not in out


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_compiles_without_spilling(target: str, tmp_path: Path) -> None:
    """Every launch in float16 and bfloat16 keeps its values in registers and fits into shared memory."""
    # ptxas speaks only when it is called, so nothing may come from the cache.
    environment = {
        "TRITON_INTERPRET": "0",
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    children = [start([str(HERE / "aot_compile.py"), target, str(size)], environment) for size in HEAD_SIZES]
    kinds = set(product(LAUNCHES, ("torch.float16", "torch.bfloat16")))
    for (out, err), child in zip(outputs(children), children, strict=True):
        assert child.returncode == 0, err[-3000:]
        launches = [json.loads(line) for line in out.splitlines()]
        assert {(used["launch"], used["dtype"]) for used in launches} == kinds
        for used in launches:
            assert used["local"] == 0, f"spills: {used}"
            assert used["shared"] <= SHARED_MEMORY[target], used
            assert used["binary"] > 0


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A Python of its own, since Triton reads its environment once; with one thread, as several run side by side."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=HERE.parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(children: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What each printed; they run side by side."""
    try:
        return [child.communicate() for child in children]
    finally:
        for child in children:
            child.kill()  # only matters if the wait above was interrupted
