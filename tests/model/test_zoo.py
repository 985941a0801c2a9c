"""Tiny random models: the same in memory and as a folder, with nothing about them too regular."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.errors import InvalidValue
from common.model.config import ARCHITECTURES, ModelConfig
from common.model.loader import load_model, resolve
from common.model.shapes import tensor_shapes
from common.model.zoo import make_tiny, tiny_config, tiny_decoder, tiny_tokenizer, tiny_weights

FAMILIES = list(ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_names_and_shapes_are_transformers_own(family: str, tied: bool) -> None:
    """B74: also where head_dim is not hidden / heads."""
    overrides: dict = {"tie_word_embeddings": tied}
    if family in ("llama", "qwen3"):
        overrides["attention_bias"] = tied
    if family == "llama":
        overrides["mlp_bias"] = tied
    hf_config = tiny_config(family, **overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    assert tensor_shapes(ModelConfig.from_hf(hf_config)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_and_memory_agree(family: str, tmp_path: Path) -> None:
    """Same seed, same weights; transformers reads the folder without a missing or unknown tensor."""
    folder = make_tiny(family, tmp_path, seed=5)
    config = ModelConfig.from_hf(tiny_config(family))
    weights = tiny_weights(config, seed=5)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = load_model(folder, "float64")
    made = tiny_decoder(family, seed=5)
    assert torch.equal(loaded.embedding.double(), made.embedding.double())
    assert loaded.config.eos_token_ids == {2, 0}  # B100: of the generation config and the config together
    assert AutoConfig.from_pretrained(folder).architectures == [ARCHITECTURES[family]]


def test_seeds_differ() -> None:
    """Another seed, other weights; no norm weight is one and no bias zero, so leaving one out shows."""
    config = ModelConfig.from_hf(tiny_config("qwen2"))
    first, second = tiny_weights(config), tiny_weights(config, seed=1)
    for name in first:
        assert not torch.equal(first[name], second[name]), name
        assert first[name].std() > 0.01, name


@pytest.mark.timing
@pytest.mark.parametrize("family", FAMILIES)
def test_in_memory_takes_milliseconds(family: str) -> None:
    """Tests and notebooks make many of them."""
    tiny_decoder(family)  # imports
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        tiny_decoder(family)
        took.append(time.perf_counter() - begun)
    assert min(took) < 0.1


def test_tokenizer_round_trip() -> None:
    """Bytes, merges, special tokens; ids below the width of the logits (B82: fewer than it)."""
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer("the")["input_ids"] == [tokenizer.convert_tokens_to_ids("the")]
    text = "the théing <|im_end|>\n\x00🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) < tiny_config("llama").vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_chat_template_survives_the_folder(tmp_path: Path) -> None:
    """ChatML, with and without the assistant's opening."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny("llama", tmp_path))
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template(chat, tokenize=False) + "<|im_start|>assistant\n" == text


def test_by_name_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is made once; another seed is another folder."""
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path))
    first = resolve("tiny-llama")
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve("tiny-llama") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    other = resolve("tiny-llama:7")
    assert other != first
    weights = load_file(other / "model.safetensors")
    expected = tiny_weights(ModelConfig.from_hf(tiny_config("llama")), seed=7)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_unknown_family() -> None:
    """Refused with the list."""
    with pytest.raises(InvalidValue, match="family: got 'gpt2', allowed: llama, mistral, qwen2, qwen3"):
        tiny_decoder("gpt2")
