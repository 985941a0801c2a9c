"""Tiny random transformers models, and our decoder over the same weights.

Everything is random, norm weights and biases too: weights of one and biases of zero hide a norm in the wrong
place or a bias left out.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from common.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.decoder import Decoder
from common.protocol import Request
from common.sequence import Sequence
from stage1_naive.no_cache import NoCache

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
TWO_OF_THREE = ["sliding_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (LlamaConfig, {"head_dim": 16}),
    "llama-no-gqa": (LlamaConfig, {"num_key_value_heads": None}),
    "llama-one-kv-head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama-linear": (LlamaConfig, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}),
    "llama-llama3": (LlamaConfig, {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": dict(YARN)}),
    "llama-yarn-mscale": (LlamaConfig, {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 5, "head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-tied-window": (
        Qwen2Config,
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-tied-biases": (
        Qwen3Config,
        {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-layer-types": (
        Qwen3Config,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 4, "layer_types": TWO_OF_THREE},
    ),
}
"""Name -> config class and what differs from `SHAPE`: each family, and each thing in which they vary."""


def make_config(variant: str = "llama", **changes: Any) -> PreTrainedConfig:
    """The transformers config of a variant, with further `changes`."""
    kind, differs = VARIANTS[variant]
    return kind(**(SHAPE | differs | changes))


def make_hf(config: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model for `config`, the same in every dtype but for rounding.

    transformers narrows to float32 inside RMSNorm even in a float64 model, which alone would cost 1e-7; here
    a float64 model's norms stay in float64, so that 1e-9 means something.  Half precision is left as it is.
    """
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if name.endswith("bias"):
                weight.copy_(noise * 0.5)
            elif weight.dim() == 1:
                weight.copy_(1 + noise * 0.4)
            elif "embed_tokens" in name:
                weight.copy_(noise * 0.5)
            else:
                weight.copy_(noise * 1.5 * weight.shape[1] ** -0.5)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(_norm_in_float64, module)
    return model.to(dtype)


def _norm_in_float64(module: Any, x: torch.Tensor) -> torch.Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return module.weight * (x * torch.rsqrt(mean_square + module.variance_epsilon))


def make_decoder(hf: PreTrainedModel, dtype: torch.dtype | None = None) -> Decoder:
    """Our decoder over the same weights."""
    config = ModelConfig.from_hf(hf.config, hf.generation_config)
    return Decoder.from_tensors(config, hf.state_dict().__getitem__, dtype or hf.dtype)


def make_pair(
    variant: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> tuple[PreTrainedModel, Decoder]:
    """A random transformers model and our decoder over the same weights."""
    hf = make_hf(make_config(variant, **changes), dtype, seed)
    return hf, make_decoder(hf)


def random_prompts(
    lengths: Iterable[int], vocab_size: int = SHAPE["vocab_size"], seed: int = 0
) -> list[list[int]]:
    """Prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def hf_logits(hf: PreTrainedModel, prompt: Seq[int]) -> torch.Tensor:
    """`[T, V]`: transformers' logits of every position of one prompt, alone and without padding."""
    return hf(input_ids=torch.tensor([prompt])).logits[0]


def pack(prompts: Iterable[Seq[int]]) -> ForwardBatch:
    """Whole prompts end to end, logits wanted for the last row of each."""
    requests = [Request(str(index), tuple(prompt)) for index, prompt in enumerate(prompts)]
    return ForwardBatch.pack([(Sequence(request), len(request.prompt_token_ids)) for request in requests])


@torch.inference_mode()
def our_logits(decoder: Decoder, prompts: Seq[Seq[int]]) -> list[torch.Tensor]:
    """`[T, V]` for each prompt: our logits of every position, all prompts packed into one forward."""
    batch = pack(prompts)
    every_row = replace(batch, logits_rows=torch.arange(batch.num_tokens))
    return list(decoder.forward(every_row, NoCache(decoder.config)).split(batch.query_lens))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
