"""The numba kernels against the torch operators that define them."""

from __future__ import annotations

import pytest
import torch
from support.hf_oracle import make_config, make_decoder, make_hf, our_logits, random_prompts, relative_error

from common.model import cpu_steps, layers, rope

WIDTH = 96


@pytest.fixture
def torch_only(monkeypatch):
    """Switch the kernels off."""
    monkeypatch.setattr(cpu_steps, "serves", lambda x: False)


@pytest.fixture(params=["one thread", "all threads"])
def threads(request, monkeypatch):
    """Both compiled ways, whatever the size."""
    monkeypatch.setattr(cpu_steps, "FEW_RESULTS", 0 if request.param == "all threads" else 1 << 40)


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_torch(dtype, rows, with_delta, torch_only, threads):
    """The sum is equal bit for bit; the norm is too in bfloat16, and to a few roundings in float32 (B67)."""
    hidden = (torch.randn(rows, WIDTH) * 3).to(dtype)
    delta = torch.randn(rows, WIDTH).to(dtype) if with_delta else None
    weight = (1 + torch.randn(WIDTH) / 2).to(dtype)
    theirs_hidden = hidden.clone()
    theirs = layers.add_rms_norm(theirs_hidden, delta, weight, 1e-5)
    ours = cpu_steps.add_rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, theirs_hidden)
    # The order of a float32 sum may move one bfloat16 in thousands over the edge of a rounding.
    assert (ours != theirs).float().mean() < (0.002 if dtype == torch.bfloat16 else 1)
    assert torch.allclose(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("heads", "size"), [(12, 64), (3, 6), (1, 2), (5, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_torch_bit_for_bit(dtype, heads, size, torch_only, threads):
    """Each product is rounded before the sum; the value heads behind are left alone."""
    packed = torch.randn(7, (heads + 2) * size).to(dtype)
    inv_freq = torch.rand(size // 2)
    tables = rope.cos_and_signed_sin(torch.arange(7) * 91, inv_freq, 1.2, dtype)
    before = packed.clone()
    assert torch.equal(cpu_steps.rotate(packed, heads, *tables), rope.rotate(packed, heads, *tables))
    assert torch.equal(packed, before)


@pytest.mark.parametrize(("rows", "inner"), [(1, 1536), (3, 7), (64, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_equals_torch(dtype, rows, inner, torch_only, threads):
    """To a few roundings in float32, which rarely moves a bfloat16; gates far out on both sides as well."""
    gate_up = (torch.randn(rows, 2 * inner) * 4).to(dtype)
    gate_up[:, :inner:3] *= 12
    before = gate_up.clone()
    theirs, ours = layers.silu_product(gate_up), cpu_steps.silu_product(gate_up)
    assert torch.equal(gate_up, before)
    assert ours.shape == (rows, inner)
    assert (ours != theirs).float().mean() < (0.01 if dtype == torch.bfloat16 else 1)
    rtol = 16 * torch.finfo(torch.float32).eps if dtype == torch.float32 else torch.finfo(dtype).eps
    # Far below zero e ** -x loses digits to the size of x, where the result is next to nothing.
    assert torch.allclose(ours, theirs, rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_at_the_ends_of_the_range(dtype, torch_only):
    """B58: what is not a number stays so and disturbs nobody; where e ** -x is infinite, the result is -0."""
    infinity = float("inf")
    gates = torch.tensor(
        [[float("nan"), infinity, -infinity, -1e30, -150.0, 0.0, -0.0, 150.0, 1e30, 1.0]]
    ).to(dtype)
    gate_up = torch.cat((gates, torch.full_like(gates, 2.0)), dim=-1)
    ours, theirs = cpu_steps.silu_product(gate_up), layers.silu_product(gate_up)
    assert torch.allclose(ours, theirs, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit()[0, 1:2], theirs.signbit()[0, 1:2])
    assert torch.equal(ours.signbit()[0, 3:], theirs.signbit()[0, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_stays_in_its_row(dtype, bad, torch_only):
    """B58: NaN and infinity come out as torch has them, bfloat16's rounding included."""
    hidden = torch.randn(3, WIDTH).to(dtype)
    hidden[1, 5] = bad
    weight = torch.ones(WIDTH, dtype=dtype)
    theirs = layers.add_rms_norm(hidden.clone(), None, weight, 1e-5)
    ours = cpu_steps.add_rms_norm(hidden, None, weight, 1e-5)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan().any(dim=1).tolist() == [False, True, False]
    # The NaN of the largest payload must not round up into a number.
    bits = torch.full((1, WIDTH), 0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    assert cpu_steps.add_rms_norm(bits, bits, weight.bfloat16(), 1e-5).isnan().all()


def test_large_values_round_as_in_torch(torch_only):
    """Ties go to even, and the largest bfloat16 rounds up to infinity, as IEEE has it."""
    hidden = torch.tensor([[256.0, 256.0, 258.0, 3.3895e38]]).bfloat16()
    delta = torch.tensor([[1.0, 3.0, 1.0, 3.3895e38]]).bfloat16()
    expected = hidden + delta
    cpu_steps.add_rms_norm(hidden, delta, torch.ones(4).bfloat16(), 1e-5)
    assert hidden.tolist() == [[256.0, 260.0, 260.0, float("inf")]]
    assert torch.equal(hidden, expected)


def test_a_strided_tensor_is_refused():
    """The kernels see an address, so a strided row would be read wrongly."""
    with pytest.raises(ValueError, match="strided"):
        cpu_steps.add_rms_norm(torch.randn(4, 32)[:, ::2], None, torch.ones(16), 1e-5)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_says_the_same_without_the_kernels(variant, dtype, request, monkeypatch):
    """The whole decoder, at a size that some steps give to one thread and others to all."""
    monkeypatch.setattr(cpu_steps, "FEW_RESULTS", 4096)
    decoder = make_decoder(make_hf(make_config(variant), dtype))
    prompts = random_prompts([40, 30, 20, 1])
    ours = our_logits(decoder, prompts)
    request.getfixturevalue("torch_only")
    theirs = our_logits(decoder, prompts)
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a.float(), b.float()) < (1e-5 if dtype == torch.float32 else 0.01)
