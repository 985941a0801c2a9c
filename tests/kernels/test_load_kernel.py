"""Choosing a kernel by name and device."""

from __future__ import annotations

import sys

import pytest
from support.interpreter import INTERPRETED

from common.errors import InvalidValue, ModelError
from stage3_paged.kernels import load_kernel


def test_auto_takes_the_cpu_kernel_on_cpu() -> None:
    """Without a GPU, `auto` is the CPU kernel."""
    assert load_kernel("auto", "cpu") is load_kernel("cpu", "cpu")


def test_auto_takes_triton_on_a_gpu() -> None:
    """With one, Triton; importing it needs no GPU yet."""
    pytest.importorskip("triton")
    assert load_kernel("auto", "cuda") is load_kernel("triton", "cuda")
    assert hasattr(load_kernel("triton", "cuda"), "paged_attention_simple")


@pytest.mark.parametrize(("name", "device"), [("fast", "cpu"), ("", "cpu"), ("cpu", "cuda")])
def test_impossible_choices_are_named(name: str, device: str) -> None:
    """Unknown names, and kernels that cannot run where the model is."""
    with pytest.raises(InvalidValue, match=f"kernel: got {name!r}, allowed: "):
        load_kernel(name, device)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_triton_on_cpu_is_refused() -> None:
    """Triton has no CPU backend; the message says what has, and how to try it all the same."""
    with pytest.raises(InvalidValue, match=r"kernel: got 'triton', .*TRITON_INTERPRET=1"):
        load_kernel("triton", "cpu")


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install, and what works without it."""
    for module in ("stage3_paged.kernels.triton", "stage3_paged.kernels.triton_device"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModelError, match=r"kernel 'triton' needs the package 'triton', .* 'reference'"):
        load_kernel("triton", "cuda")
