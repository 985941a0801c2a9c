"""Rotary embedding: known answers, transformers' tables bit for bit, and the algebra of a rotation."""

from __future__ import annotations

import math

import pytest
import torch
from support.hf_oracle import LLAMA3, VARIANTS, YARN, make_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from common.errors import ModelError
from common.model.config import ModelConfig
from common.model.rope import cos_and_signed_sin, rotate


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
@pytest.mark.parametrize(("factor", "middle"), [(8.0, (1.553, 2.695, 5.257)), (32.0, None)])
def test_llama3_known_answers(key, factor, middle):
    """B71: plain / scaled is 1 up to index 14, then three known ratios, then the config's own factor."""
    scaling = LLAMA3 | {"factor": factor, "original_max_position_embeddings": 8192}
    if key == "rope_parameters":
        words = {"rope_parameters": scaling | {"rope_theta": 500000.0}}
    elif key == "rope_scaling":
        words = {"rope_scaling": scaling, "rope_theta": 500000.0}
    else:
        scaling["type"] = scaling.pop("rope_type")
        words = {"rope_scaling": scaling, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, **words)
    scaled = ModelConfig.from_hf(config).rope_inv_freq
    assert len(scaled) == 32
    ratios = [500000.0 ** (-2 * i / 64) / frequency for i, frequency in enumerate(scaled)]
    assert ratios[:15] == pytest.approx([1.0] * 15, rel=1e-5)
    assert ratios[18:] == pytest.approx([factor] * 14, rel=1e-5)
    if middle:
        assert ratios[15:18] == pytest.approx(middle, abs=1e-3)


def test_linear_and_default_known_answers():
    """Linear scaling divides every frequency; without scaling it is theta ** (-2i / D)."""
    plain = ModelConfig.from_hf(make_config("llama", head_dim=8, rope_theta=1e4)).rope_inv_freq
    assert plain == pytest.approx([1.0, 1e-1, 1e-2, 1e-3], rel=1e-6)
    scaling = {"rope_type": "linear", "factor": 2.5}
    config = make_config("llama", head_dim=8, rope_theta=1e4, rope_scaling=scaling)
    assert ModelConfig.from_hf(config).rope_inv_freq == pytest.approx([0.4, 0.04, 0.004, 0.0004], rel=1e-6)


def test_yarn_known_answers():
    """Yarn keeps the fastest frequency, divides the slowest by the factor, and lengthens the vectors."""
    config = ModelConfig.from_hf(make_config("llama", head_dim=64, rope_parameters=dict(YARN)))
    assert config.rope_scale == pytest.approx(0.1 * math.log(4) + 1)
    assert config.rope_inv_freq[0] == pytest.approx(1.0)
    assert config.rope_inv_freq[-1] == pytest.approx(1e4 ** (-62 / 64) / 4, rel=1e-5)
    config = make_config("llama", rope_parameters=YARN | {"attention_factor": 0.75})
    assert ModelConfig.from_hf(config).rope_scale == 0.75


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("llama")])
def test_rotated_heads_equal_transformers_bit_for_bit(variant, dtype):
    """The tables (float32 angles, then cast) and each rounding of the rotation are transformers' own."""
    hf_config = make_config(variant)
    config = ModelConfig.from_hf(hf_config)
    positions = torch.tensor([0, 1, 5, 31, 32, 33, 127, 257, 8191, 100_000])
    qkv = torch.randn(10, 9, config.head_dim, dtype=dtype)
    heads = qkv[:, :7]  # a strided view, as in the decoder

    cos, sin = LlamaRotaryEmbedding(hf_config)(heads, positions[None])
    theirs, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    inv_freq = torch.tensor(config.rope_inv_freq)
    ours = rotate(qkv.flatten(1), 7, *cos_and_signed_sin(positions, inv_freq, config.rope_scale, dtype))
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs[0].transpose(0, 1))


def test_scores_depend_on_distance_only():
    """A rotation keeps lengths, and q . k depends on how far apart they stand."""
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    inv_freq = torch.tensor([1e4 ** (-i / 8) for i in range(8)])

    def turn(head: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(head[0], 1, *cos_and_signed_sin(torch.tensor([position]), inv_freq, 1.0, torch.float64))

    assert turn(q, 77).norm() == pytest.approx(q.norm().item(), rel=1e-6)
    near, far = (turn(q, 9) * turn(k, 4)).sum(), (turn(q, 905) * turn(k, 900)).sum()
    assert near.item() == pytest.approx(far.item(), abs=1e-3)
    assert abs((near - (turn(q, 9) * turn(k, 5)).sum()).item()) > 1e-2


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "proportional"}, "'proportional'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "0.5"),
    ],
)
def test_other_rope_is_refused_by_name(rope, word):
    """What the decoder would compute wrongly is refused when the model is opened."""
    with pytest.raises(ModelError, match=word):
        ModelConfig.from_hf(make_config("llama", rope_parameters=rope))
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    with pytest.raises(ModelError, match="longrope"):
        ModelConfig.from_hf(make_config("llama", rope_parameters=longrope))
