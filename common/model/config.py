"""The shape of a decoder, read once from a transformers config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from common.errors import ModelError
from common.model.rope import inverse_frequencies

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""transformers' model type -> its class name, for every family that the decoder serves."""


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs to know, and nothing of where it was read.

    Attributes:
        architecture: transformers' class name, such as "LlamaForCausalLM".
        vocab_size: width of the logits (V); a tokenizer may know fewer or more ids.
        sliding_windows: per layer, how many latest positions it sees; None sees all.
        rope_inv_freq: rotary frequencies after scaling, `[D / 2]`.
        rope_scale: factor on cos and sin (yarn's attention factor).
        eos_token_ids: all ids that end an answer (generation config and config together).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_inv_freq: tuple[float, ...]
    rope_scale: float = 1.0
    sliding_windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, hf_config: Any, generation_config: Any = None) -> ModelConfig:
        """Read a transformers config, and refuse what the decoder would compute wrongly.

        Args:
            hf_config: a `LlamaConfig`, `MistralConfig`, `Qwen2Config` or `Qwen3Config`.
            generation_config: a `GenerationConfig` or None; its end-of-sequence ids count as well.

        Raises:
            ModelError: names the field, its value and what there is.
        """
        architecture = _architecture(hf_config)
        heads, kv_heads, head_dim = _heads(hf_config)
        inv_freq, rope_scale = inverse_frequencies(hf_config, head_dim)
        llama, qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
        attention_bias = (llama or qwen3) and hf_config.attention_bias
        return cls(
            architecture=architecture,
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=hf_config.max_position_embeddings,
            rms_norm_eps=hf_config.rms_norm_eps,
            rope_inv_freq=inv_freq,
            rope_scale=rope_scale,
            sliding_windows=_sliding_windows(architecture, hf_config),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=llama and hf_config.mlp_bias,
            qk_norm=qwen3,
            tie_word_embeddings=hf_config.tie_word_embeddings,
            eos_token_ids=_eos(hf_config) | _eos(generation_config),
        )

    def window(self, layer: int) -> int | None:
        """How many latest positions a layer sees, None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return self.head_dim**-0.5

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """K and V of one token over all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def _architecture(hf_config: Any) -> str:
    """The class name that the checkpoint states, or that of its model type, if it is one that we have."""
    model_type = getattr(hf_config, "model_type", None)
    stated = getattr(hf_config, "architectures", None)
    name = stated[0] if stated else ARCHITECTURES.get(model_type or "", str(model_type))
    if name not in ARCHITECTURES.values():
        raise ModelError(f"architecture: got {name!r}, allowed: {', '.join(ARCHITECTURES.values())}")
    if hf_config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act: got {hf_config.hidden_act!r}, allowed: 'silu'")
    return name


def _heads(hf_config: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and head size."""
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads: got {kv_heads}, allowed: a divisor of {heads} query heads")
    # A null or missing head_dim is hidden / heads, unless the config class has filled in its own.
    return heads, kv_heads, getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads


def _sliding_windows(architecture: str, hf_config: Any) -> tuple[int | None, ...]:
    """Mistral's window is every layer's; Qwen names the layers that have one; Llama has none."""
    layers = hf_config.num_hidden_layers
    if architecture == "LlamaForCausalLM":
        return ()
    window = hf_config.sliding_window
    if architecture == "MistralForCausalLM":
        return (window,) * layers if window else ()
    windows = {"full_attention": None, "sliding_attention": window}
    types = hf_config.layer_types
    if len(types) != layers or not windows.keys() >= set(types):
        raise ModelError(f"layer_types: got {types}, allowed: {layers} of {' or '.join(windows)}")
    if "sliding_attention" not in types:
        return ()
    if not window:
        raise ModelError(
            f"sliding_window: got {window}, allowed: at least 1, since layer_types has sliding layers"
        )
    return tuple(windows[kind] for kind in types)


def _eos(config: Any) -> frozenset[int]:
    """The end-of-sequence ids of a config, which holds one, a list or none."""
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
