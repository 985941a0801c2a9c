"""Attention over blocks behind one signature: `reference` (plain torch), `triton` (GPU) and `cpu`.

Read `reference.py` first.  It is the oracle of the other two and gives the full contract of each function.
"""

from __future__ import annotations

import importlib
import os
from typing import Protocol, cast

import torch

from common.errors import InvalidValue, ModelError

NAMES = ("auto", "reference", "triton", "cpu")


class Kernel(Protocol):
    """What each kernel module offers; shapes and errors are those of `reference.py`."""

    def make_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, in whatever physical layout the kernel reads best."""
        ...

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write `[T, Hkv, D]` K and V to the slots `[T]`."""

    def gather(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Read slots `[n]` of one of the caches back: `[n, Hkv, D]`."""
        ...

    def paged_attention(  # noqa: PLR0913, PLR0917
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int | None = None,
        out: torch.Tensor | None = None,
        query_lens: list[int] | None = None,
        context_lens: list[int] | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with the queries `[T, Hq, D]`, the last positions of each sequence, over its blocks."""
        ...


def load_kernel(name: str, device: torch.device | str) -> Kernel:
    """Import a kernel: only the one that is used, since each needs a compiler that the others do not.

    Args:
        name: "reference", "triton" or "cpu"; "auto" is "triton" on a GPU and "cpu" elsewhere.
        device: where the model is.

    Raises:
        InvalidValue: no such kernel, or one that cannot run on this device.
        ModelError: the kernel's compiler is not installed.
    """
    kind = torch.device(device).type
    if name not in NAMES:
        raise InvalidValue("kernel", name, " or ".join(map(repr, NAMES)))
    if name == "auto":
        name = "triton" if kind == "cuda" else "cpu"
    if name == "cpu" and kind != "cpu":
        raise InvalidValue("kernel", name, f"'auto', 'reference' or 'triton' for a model on {kind}")
    if name == "triton" and kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        allowed = f"'auto', 'reference' or 'cpu' for a model on {kind} (or TRITON_INTERPRET=1, slowly)"
        raise InvalidValue("kernel", name, allowed)
    try:
        return cast(Kernel, importlib.import_module(f"{__name__}.{name}"))
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in ("triton", "numba"):
            raise
        raise ModelError(
            f"kernel {name!r} needs the package {library!r}, which is not installed: "
            f"pip install {library}, or choose kernel 'reference'"
        ) from missing
