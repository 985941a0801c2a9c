"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled ahead of time for three GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

HERE = Path(__file__).parent
HEAD_SIZES = (64, 128, 256)
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Most bytes that one program can have."""


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """The files that judge all kernels, once more in a process where Triton interprets."""
    files = [str(HERE / name) for name in ("test_paged_attention.py", "test_triton_kernels.py")]
    command = [sys.executable, "-m", "pytest", *files, "-q", "--no-header", "-p", "no:cacheprovider"]
    child = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-1000:]
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None
    assert int(passed[1]) > 80
    assert "skipped" not in child.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_compiles_without_spilling(target: str, tmp_path: Path) -> None:
    """Every launch in float16 and bfloat16 keeps its values in registers and fits into shared memory."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # ptxas speaks only when it is called, so nothing may come from the cache.
    environment |= {
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    program = str(HERE / "aot_compile.py")
    children = [
        subprocess.Popen(
            [sys.executable, program, target, str(size)],
            env=environment,
            cwd=HERE.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for size in HEAD_SIZES
    ]
    for size, (out, err), child in [(n, c.communicate(), c) for n, c in zip(HEAD_SIZES, children, strict=True)]:
        assert child.returncode == 0, err[-3000:]
        launches = [json.loads(line) for line in out.splitlines()]
        assert {(one["launch"], one["dtype"]) for one in launches} == {
            (launch, dtype)
            for launch in ("store", "simple", "prompt", "decode", "split", "merge")
            for dtype in ("torch.float16", "torch.bfloat16")
        }
        for launch in launches:
            assert launch["local"] == 0, f"head size {size} spills: {launch}"
            assert launch["shared"] <= SHARED_MEMORY[target], f"head size {size}: {launch}"
            assert launch["binary"] > 0
