"""What is read from a transformers config, what is refused, and how weights are taken in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.hf_oracle import SHAPE, make_config, make_decoder, make_hf, make_pair, our_logits, random_prompts
from transformers import GemmaConfig, GenerationConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from common.errors import ModelError
from common.model.config import ModelConfig
from common.model.decoder import Decoder
from common.model.layers import rms_norm
from common.model.linear import PackedLinear, PlainLinear, can_pack, row_step


@pytest.mark.parametrize(
    ("variant", "head_dim"), [("llama", 32), ("mistral", 32), ("qwen2", 32), ("qwen3", 32)]
)
def test_head_dim_is_not_hidden_over_heads(variant, head_dim):
    """B74: hidden 64, 4 heads, head_dim 32 gives q_proj 128 x 64 and scale 32 ** -0.5."""
    words = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": head_dim}
    hf = make_hf(make_config(variant, **words))
    assert hf.model.layers[0].self_attn.q_proj.weight.shape == (128, 64)
    config = make_decoder(hf).config
    assert config.head_dim == 32
    assert config.attention_scale == 32**-0.5


def test_head_dim_null_or_missing_follows_the_family():
    """B74: hidden / heads for Llama, the config class's own 128 for Qwen3."""
    words = SHAPE | {"hidden_size": 64, "num_attention_heads": 4}
    assert ModelConfig.from_hf(LlamaConfig(**words)).head_dim == 16
    assert ModelConfig.from_hf(LlamaConfig(**words, head_dim=None)).head_dim == 16
    assert ModelConfig.from_hf(Qwen3Config(**words)).head_dim == 128


def test_end_ids_of_both_configs_count():
    """One id, a list, or none, in either config."""
    config = make_config("llama", eos_token_id=[2, 5])
    assert ModelConfig.from_hf(config).eos_token_ids == {2, 5}
    assert ModelConfig.from_hf(config, GenerationConfig(eos_token_id=7)).eos_token_ids == {2, 5, 7}
    config = make_config("llama", eos_token_id=None)
    assert ModelConfig.from_hf(config, GenerationConfig()).eos_token_ids == frozenset()


def test_windows_by_layer():
    """Mistral's window is every layer's, Qwen's only those that say so, and only if it is switched on."""
    assert ModelConfig.from_hf(make_config("mistral", sliding_window=9)).sliding_windows == (9, 9, 9)
    assert ModelConfig.from_hf(make_config("mistral")).window(0) is None
    assert ModelConfig.from_hf(make_config("qwen2-tied-window")).sliding_windows == (None, 4, 4)
    assert ModelConfig.from_hf(make_config("qwen3-layer-types")).sliding_windows == (4, None, 4)
    assert ModelConfig.from_hf(make_config("qwen2", sliding_window=4)).sliding_windows == ()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GemmaConfig, "architecture: got 'gemma', allowed: LlamaForCausalLM, MistralForCausalLM"),
        (
            lambda: make_config("llama", architectures=["LlamaForSequenceClassification"]),
            "LlamaForSequenceClassification",
        ),
        (lambda: make_config("llama", hidden_act="gelu"), "hidden_act: got 'gelu', allowed: 'silu'"),
        (lambda: make_config("llama", num_key_value_heads=4), "num_key_value_heads: got 4"),
        (
            lambda: make_config("qwen3", layer_types=["full_attention"] * 2 + ["linear_attention"]),
            "layer_types",
        ),
    ],
)
def test_refused_by_name(config, words):
    """The message names the field, its value and what there is."""
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_hf(config())


@pytest.mark.parametrize("variant", ["llama-biases", "llama-tied", "qwen2", "qwen3-tied-biases"])
def test_each_tensor_is_asked_for_once(variant):
    """Every tensor of the checkpoint is read exactly once, and none that is not there."""
    hf = make_hf(make_config(variant))
    tensors, asked = hf.state_dict(), []

    def get(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors[name]

    Decoder.from_tensors(ModelConfig.from_hf(hf.config), get, torch.float64)
    expected = set(tensors) - ({"lm_head.weight"} if hf.config.tie_word_embeddings else set())
    assert sorted(asked) == sorted(expected)


def test_a_wrong_shape_is_named():
    """A checkpoint that does not fit its config is refused with the tensor's name."""
    hf = make_hf(make_config("llama"))
    config = ModelConfig.from_hf(make_config("llama", intermediate_size=81))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight: got shape \[80, 48\]"):
        Decoder.from_tensors(config, hf.state_dict().__getitem__, torch.float64)


def test_tied_table_stays_as_it_was_stored():
    """A bfloat16 table serves a float32 run: rows are widened after look-up, which is exact."""
    hf = make_hf(make_config("llama-tied"), torch.bfloat16)
    narrow = make_decoder(hf, torch.float32)
    wide = make_decoder(hf.float(), torch.float32)
    if can_pack(torch.float32):
        assert narrow.embedding.dtype == torch.bfloat16
    prompts = random_prompts([4, 9])
    for ours, theirs in zip(our_logits(narrow, prompts), our_logits(wide, prompts), strict=True):
        assert torch.equal(ours, theirs)


def test_plain_copies_can_be_dropped():
    """Nothing the decoder keeps lies in the checkpoint's memory but the table."""
    if not can_pack(torch.float32):
        pytest.skip("plain layers keep the checkpoint's memory")
    hf, decoder = make_pair("llama-biases", torch.float32)
    prompts = random_prompts([4, 9])
    before = our_logits(decoder, prompts)
    with torch.no_grad():
        for name, tensor in hf.state_dict().items():
            if name != "model.embed_tokens.weight":
                tensor.fill_(float("nan"))
    assert all(map(torch.equal, before, our_logits(decoder, prompts)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_rounds_where_llama_rounds(dtype):
    """B67: normalise in float32, cast, then times the weight; rounding once at the end differs."""
    reference = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    torch.nn.init.normal_(reference.weight, mean=1.0, std=0.5)
    x = torch.randn(200, 64).mul(3).to(dtype)
    with torch.no_grad():
        ours = rms_norm(x, reference.weight, 1e-5)
        assert torch.equal(ours, reference(x))
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        rounded_once = (wide * reference.weight.float()).to(dtype)
    assert torch.equal(ours, rounded_once) == (dtype == torch.float32)


def test_norm_of_a_float64_row_is_not_narrowed():
    """Float64 stays float64, or no test at 1e-9 would mean anything."""
    x = torch.randn(3, 64, dtype=torch.float64)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (rms_norm(x, torch.ones(64, dtype=torch.float64), 1e-5) - exact).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 64, 130])
def test_packed_linear_is_linear(rows, dtype):
    """Any number of rows (a few are padded inside), with and without bias, rows strided too."""
    if not can_pack(dtype):
        pytest.skip("this CPU or torch has no packed linear layer")
    weight, bias = torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype)
    x = torch.randn(rows, 48, dtype=dtype)[:, ::2]  # [rows, 24]
    exact = x.double() @ weight.double().T  # [rows, 40]
    tolerance = 60 * torch.finfo(dtype).eps
    for layer in (PackedLinear(weight), PlainLinear(weight)):
        assert layer(x).shape == (rows, 40)
        assert torch.allclose(layer(x).double(), exact, atol=tolerance)
    assert torch.allclose(PackedLinear(weight, bias)(x).double(), exact + bias.double(), atol=tolerance)


def test_packed_linear_meets_few_numbers_of_rows():
    """Code that oneDNN keeps for each: no more than a hundred up to 8,192, and at most an eighth of work is added."""
    met = {rows: rows + -rows % row_step(rows) for rows in range(1, 8193)}
    assert len(set(met.values())) < 100
    assert all(made <= max(32, rows * 9 / 8) for rows, made in met.items())


def test_can_pack_says_no_without_the_operators(monkeypatch):
    """A torch without the private operators, or with others under the name, takes the plain layer."""
    assert not can_pack(torch.float64)
    for namespace in (SimpleNamespace(), SimpleNamespace(_linear_pointwise=None)):
        monkeypatch.setattr(torch.ops, "mkldnn", namespace)
        assert not can_pack.__wrapped__(torch.float32)
