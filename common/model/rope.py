"""Rotary position embedding: a head's pairs of numbers are turned by an angle that grows with the position.

Su et al., "RoFormer" (2021).  Scaling for longer contexts (linear, llama3, yarn) changes the frequencies, and
yarn the length of the turned vectors too; the rotation itself is always the same.
"""

from __future__ import annotations

from typing import Any

import torch

from common.errors import ModelError
from common.model import cpu_steps

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(hf_config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Angle per position of each pair, `[D / 2]`, and the factor on cos and sin.

    Args:
        hf_config: a transformers config; the old keys (`rope_scaling`, `type`, `rope_theta`) count as well.
        head_dim: D.

    Raises:
        ModelError: the rope type is not one of `ROPE_TYPES`, differs by layer, or turns only a part of D.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415  slow to import

    hf_config.standardize_rope_params()
    parameters = hf_config.rope_parameters
    if "rope_type" not in parameters:
        raise ModelError(
            f"rope_parameters: got one set per layer type ({', '.join(parameters)}), allowed: one for all"
        )
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"rope_type: got {rope_type!r}, allowed: {', '.join(ROPE_TYPES)}")
    part = parameters.get("partial_rotary_factor") or 1.0
    if part != 1.0 or head_dim % 2:
        raise ModelError(f"rotary size: got {part} of head_dim {head_dim}, allowed: all of an even head_dim")
    if rope_type == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D / 2]
        frequencies, scale = 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](hf_config)  # [D / 2]
    if frequencies.shape != (head_dim // 2,):
        raise ModelError(
            f"rope frequencies: got {frequencies.shape[0]}, allowed: head_dim / 2 = {head_dim // 2}"
        )
    return tuple(frequencies.tolist()), float(scale)


def cos_and_signed_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What every layer of one forward turns its heads with.

    Angles are float32 whatever the model's dtype, as in transformers: in bfloat16 position 257 would already
    be 256.

    Args:
        positions: `[T]` int64.
        inv_freq: `[D / 2]` float32.
        scale: factor on both.
        dtype: of the result.

    Returns:
        `[T, 1, D]` cosines and `[T, 1, D]` sines, the sines' first half negated (see `rotate`).
    """
    angles = positions[:, None].float() * inv_freq  # [T, D / 2]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    cos = torch.cat((cos, cos), dim=-1).to(dtype)  # [T, D]
    sin = torch.cat((-sin, sin), dim=-1).to(dtype)  # [T, D]
    return cos[:, None], sin[:, None]  # [T, 1, D]


def rotate(packed: torch.Tensor, num_heads: int, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turn number i of each head together with number i + D / 2.

    (a, b) becomes (a cos - b sin, b cos + a sin): the heads times cos, plus the heads with their halves
    swapped times the signed sine.  Each product is rounded before the sum, as in transformers.

    Args:
        packed: `[T, >= H * D]`, contiguous; what follows the first H heads is left out.
        num_heads: H, query and key heads together.
        cos: `[T, 1, D]`.
        signed_sin: `[T, 1, D]`.

    Returns:
        `[T, H, D]`, new and contiguous.
    """
    if cpu_steps.serves(packed):
        return cpu_steps.rotate(packed, num_heads, cos, signed_sin)
    head_dim = cos.shape[-1]
    heads = packed.view(packed.shape[0], -1, head_dim)[:, :num_heads]  # [T, H, D]
    swapped = torch.roll(heads, head_dim // 2, dims=-1)  # [T, H, D]
    return (heads * cos).add_(swapped.mul_(signed_sin))
