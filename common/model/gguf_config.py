"""A GGUF file's metadata as the config that transformers would have written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, GenerationConfig

from common.errors import ModelError
from common.model.config import ARCHITECTURES

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # as GGUF names them; Mistral goes under "llama"
PERMUTED = ("llama", "mistral")  # model types whose Q and K rows are in llama.cpp's own rotary order

_SCALING_KEYS = {"type", "factor", "original_context_length", "finetuned"}


class _Keys:
    """Looks up the keys of one architecture, and says which one is missing."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.arch = self.need("general.architecture")

    def need(self, key: str) -> Any:
        if key not in self.metadata:
            raise ModelError(f"{self.path}: GGUF key {key} is missing")
        return self.metadata[key]

    def arch_key(self, key: str) -> Any:
        return self.need(f"{self.arch}.{key}")

    def arch_get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", default)


def read_config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, Any]:
    """Build transformers' config and generation config.

    Args:
        path: the file, for error messages.
        metadata: GGUF key -> value.
        tensors: GGUF tensor name -> the reader's tensor.

    Raises:
        ModelError: a key is missing, or says what we do not have (the message names it).
    """
    keys = _Keys(path, metadata)
    if keys.arch not in GGUF_ARCHITECTURES or keys.arch_get("expert_count", 0):
        name = f"{keys.arch} with experts" if keys.arch in GGUF_ARCHITECTURES else keys.arch
        raise ModelError(
            f"{path}: architecture {name} is not supported; there are {', '.join(GGUF_ARCHITECTURES)}"
        )
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    heads = keys.arch_key("attention.head_count")
    head_dim = keys.arch_get("attention.key_length", keys.arch_key("embedding_length") // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.arch_get(key, head_dim) != head_dim:
            raise ModelError(f"{path}: {key} {keys.arch_get(key)} is not the head size {head_dim}")
    window = keys.arch_get("attention.sliding_window")
    model_type = "mistral" if keys.arch == "llama" and window else keys.arch
    options = {} if model_type.startswith("qwen2") else {"head_dim": head_dim}
    if model_type in ("llama", "qwen3"):
        options["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model_type == "llama":
        options["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if model_type == "mistral":
        options["sliding_window"] = window
    config = AutoConfig.for_model(
        model_type,
        architectures=[ARCHITECTURES[model_type]],
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),  # the metadata may count other than the rows
        hidden_size=keys.arch_key("embedding_length"),
        intermediate_size=keys.arch_key("feed_forward_length"),
        num_hidden_layers=keys.arch_key("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=keys.arch_get("attention.head_count_kv", heads),
        max_position_embeddings=keys.arch_key("context_length"),
        rms_norm_eps=keys.arch_key("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(keys, tensors, head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        **_special_ids(metadata),
        **options,
    )
    return config, GenerationConfig(**_special_ids(metadata))


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Begin, padding and every id that ends an answer (GGUF has up to three keys for those)."""

    def get(name: str) -> int | None:
        return metadata.get(f"tokenizer.ggml.{name}_token_id")

    ends = {get(name): None for name in ("eos", "eot", "eom") if get(name) is not None}  # a set in order
    return {"bos_token_id": get("bos"), "pad_token_id": get("padding"), "eos_token_id": list(ends) or None}


def _rope(keys: _Keys, tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary parameters in transformers' words."""
    theta = keys.arch_get("rope.freq_base", 10000.0)
    if "rope_freqs.weight" in tensors:
        return _llama3_rope(keys.path, theta, head_dim, np.array(tensors["rope_freqs.weight"].data))
    prefix = f"{keys.arch}.rope.scaling."
    for key in keys.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _SCALING_KEYS:
            raise ModelError(f"{keys.path}: GGUF key {key} is not supported")
    kind = keys.arch_get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}
    if kind in ("linear", "yarn"):
        rope["factor"] = keys.arch_key("rope.scaling.factor")
    elif kind != "none":
        raise ModelError(f"{keys.path}: rope scaling {kind} is not supported; there are none, linear, yarn")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.arch_key("rope.scaling.original_context_length")
    return rope


def _llama3_rope(path: Path, theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """Find the Llama 3 parameters behind the frequency factors that GGUF stores in their place.

    All Llama 3.1 and later models share the bands (1, 4) and the original length 8192; the factor is the
    largest of the list.  Whether that is true of this file is checked by computing the list again.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # [D / 2]
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)  # [D / 2]
    if factors.shape != smooth.shape or not np.allclose(
        factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4
    ):
        raise ModelError(f"{path}: rope_freqs.weight is not Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
