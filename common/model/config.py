"""The shape of a decoder, read once from a transformers config."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
