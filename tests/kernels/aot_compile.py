"""Compile every Triton kernel ahead of time, as the host would launch it, and say what the compiler used.

Run as a program (never with TRITON_INTERPRET): `python aot_compile.py sm_90 128` prints one JSON line per
launch.  The launches are recorded from the host functions themselves, so that what is compiled here is what
a GPU would get: same tiles, same warps, same specialisation of strides and pointers.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stage3_paged.kernels import triton as kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KERNELS = (
    "store_kv_kernel",
    "paged_attention_simple_kernel",
    "paged_attention_tile_kernel",
    "merge_splits_kernel",
)
OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands in for a kernel and keeps the arguments of each launch."""

    def __init__(self, kernel: Any, launches: list) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """The launcher of a grid, as Triton spells it: `kernel[grid](...)`."""
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def record(dtype: torch.dtype, head_size: int, window: int | None) -> list[tuple[str, Any, tuple, dict]]:
    """What the host functions launch: a store, the simple kernel, a prompt without and with lse, decodes."""
    launches: list = []
    for name in KERNELS:
        setattr(kernels, name, Recorder(getattr(kernels, name), launches))
    heads, kv_heads, block_size, length = 32, 8, 16, 64
    k_cache, v_cache = kernels.make_cache(8, block_size, kv_heads, head_size, dtype, "cpu")
    k = torch.empty(length, kv_heads, head_size, dtype=dtype)
    q = torch.empty(length, heads, head_size, dtype=dtype)
    lse = torch.empty(length, heads)
    tables = torch.zeros(2, 16, dtype=torch.int32)
    seq_lens = torch.full((2,), 32, dtype=torch.int32)
    prompt = torch.tensor([0, 32, 64], dtype=torch.int32)
    decode = torch.tensor([0, 1, 2], dtype=torch.int32)
    kernels.store_kv(k, k, k_cache, v_cache, torch.arange(length))
    cache = (k_cache, v_cache, tables)
    kernels.paged_attention_simple(q, *cache, prompt, seq_lens, 1.0, window)
    kernels.paged_attention(q, *cache, prompt, seq_lens, 1.0, window, num_splits=1)
    kernels.paged_attention(q, *cache, prompt, seq_lens, 1.0, window, lse=lse, num_splits=1)
    kernels.paged_attention(q[:2], *cache, decode, seq_lens, 1.0, window, num_splits=1)
    kernels.paged_attention(q[:2], *cache, decode, seq_lens, 1.0, window, lse=lse[:2], num_splits=32)
    labels = ("store", "simple", "prompt", "prompt with lse", "decode", "split", "merge")
    return [(label, *launch) for label, launch in zip(labels, launches, strict=True)]


def specialise(kernel: Any, args: tuple, kwargs: dict) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes that Triton's launcher would derive from these arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, (name, value) in enumerate([*zip(kernel.arg_names, args, strict=False), *kwargs.items()]):
        if name in OPTIONS:
            continue
        if index >= len(args) or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return signature, constants, attributes


def compile_launch(kernel: Any, args: tuple, kwargs: dict, target: GPUTarget) -> dict[str, Any]:
    """Compile one launch: bytes spilled to local memory, shared memory and registers."""
    signature, constants, attributes = specialise(kernel, args, kwargs)
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=target, options=options)
    used = {"kernel": kernel.__name__, "shared": compiled.metadata.shared}
    if target.backend == "cuda":
        text = log.getvalue()  # what ptxas -v says
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        stack = re.findall(r"(\d+) bytes stack frame", text)
        used["local"] = sum(int(n) for pair in spills for n in pair) + sum(int(n) for n in stack)
        used["registers"] = int(re.findall(r"Used (\d+) registers", text)[0])
        used["binary"] = len(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        fields = {n: int(v) for n, v in re.findall(r"\.(\w+): +(\d+)$", text, re.MULTILINE)}
        # Scalar registers spill to lanes of vector registers, which is no memory access and not counted.
        used["local"] = fields["vgpr_spill_count"] + fields["private_segment_fixed_size"]
        used["registers"] = fields["vgpr_count"]
        used["binary"] = len(compiled.asm["hsaco"])
    return used


def main(target: str, head_size: int) -> None:
    """Compile all kernels for one target and head size: float16 without a window, bfloat16 with one."""
    real = {name: getattr(kernels, name) for name in KERNELS}
    kernels.ON_AMD = TARGETS[target].backend == "hip"
    for dtype, window in ((torch.float16, None), (torch.bfloat16, 128)):
        for label, kernel, args, kwargs in record(dtype, head_size, window):
            used = compile_launch(kernel, args, kwargs, TARGETS[target])
            about = {"launch": label, "dtype": str(dtype), "window": window, "head_size": head_size}
            print(json.dumps(about | used), flush=True)
        for name, kernel in real.items():
            setattr(kernels, name, kernel)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
