"""Which kernels the tests of this folder run, and where.

Triton decides between compiler and interpreter when it is first imported, and other tests of the same session
may import it.  So the interpreter has sessions of its own: `test_triton_compilers.py` starts pytest on this
folder once more with TRITON_INTERPRET=1, and there only "triton" runs, on thinned cases.
"""

from __future__ import annotations

import pytest
from paged_cases import KernelUnderTest
from support.interpreter import INTERPRETED, needs_gpu

from stage3_paged.kernels import load_kernel


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `kernel` runs for each kernel of this session, `triton_kernel` only for that one."""
    triton = pytest.param("triton", marks=() if INTERPRETED else needs_gpu)
    if "kernel" in metafunc.fixturenames:
        names = [triton] if INTERPRETED else ["reference", "cpu", triton]
        metafunc.parametrize("kernel", names, indirect=True)
    if "triton_kernel" in metafunc.fixturenames:
        metafunc.parametrize("triton_kernel", [triton], indirect=True)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> KernelUnderTest:
    """A kernel and the device it is tested on."""
    device = "cuda" if request.param == "triton" and not INTERPRETED else "cpu"
    return KernelUnderTest(request.param, load_kernel(request.param, device), device)


triton_kernel = kernel
