"""Tiny random models of every family with a byte-level tokenizer: real code paths in milliseconds.

Norm weights and biases are random as well (ones and zeros would hide that they are left out), query heads do
not divide the hidden size evenly into `head_dim`, and the logits are wider than the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import InvalidValue
from common.model.cache import build_once
from common.model.config import ARCHITECTURES, ModelConfig
from common.model.decoder import Decoder
from common.model.shapes import tensor_shapes

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
END_IDS = (2, 0)
MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("in", "g"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "and"),
    ("e", "r"),
    ("o", "u"),
    ("Ġ", "a"),
    ("Ġ", "t"),
    ("l", "l"),
    ("Ã", "©"),  # the two bytes of é
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(family: str, **overrides: Any) -> Any:
    """A transformers config of a tiny model.

    Args:
        family: "llama", "mistral", "qwen2" or "qwen3".
        overrides: any field of the family's config class.

    Raises:
        InvalidValue: there is no such family.
    """
    from transformers import AutoConfig  # noqa: PLC0415  (slow to import)

    if family not in ARCHITECTURES:
        raise InvalidValue("family", family, ", ".join(ARCHITECTURES))
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": family in ("llama", "qwen3"),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family != "qwen2":  # whose head size is always hidden / heads
        fields["head_dim"] = 16
    if family == "mistral":
        fields["sliding_window"] = 16
    return AutoConfig.for_model(family, **(fields | overrides))


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors under transformers' names, the same for the same config and seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.rand(shape, generator=generator) + 0.5
        if name.endswith("bias"):
            return torch.randn(shape, generator=generator) * 0.2
        width = shape[1] ** -0.5  # keeps the size of what goes through
        return torch.randn(shape, generator=generator) * (0.3 if "embed" in name else 1.5 * width)

    return {name: draw(name, shape) for name, shape in tensor_shapes(config).items()}


def tiny_decoder(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> Decoder:
    """A tiny model in memory; see `tiny_config` for the arguments."""
    config = ModelConfig.from_hf(tiny_config(family, **overrides))
    return Decoder.from_tensors(config, tiny_weights(config, seed).__getitem__, dtype, "cpu")


def tiny_tokenizer() -> Any:
    """A transformers tokenizer: 3 special tokens, 256 bytes, a few merges; ChatML as its chat template."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  (slow to import)

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny(
    family: str,
    folder: Path | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a tiny model as an ordinary model folder.

    Args:
        family: see `tiny_config`.
        folder: where to (made if need be); None takes a place in the cache and makes it once.
        seed: of the weights.
        dtype: in which they are stored.
        overrides: fields of the config.

    Returns:
        The folder.

    Raises:
        InvalidValue: there is no such family.
        ModelError: the cache cannot be written.
    """
    hf_config = tiny_config(family, dtype=dtype, **overrides)

    def build(target: Path) -> None:
        _write(hf_config, seed, dtype, target)

    if folder is None:
        recipe = Path(__file__).read_bytes() + json.dumps(hf_config.to_dict(), default=str).encode()
        return build_once(f"tiny-{family}-{seed}-{hashlib.sha256(recipe).hexdigest()[:12]}", build)
    folder.mkdir(parents=True, exist_ok=True)
    build(folder)
    return folder


def _write(hf_config: Any, seed: int, dtype: torch.dtype, folder: Path) -> None:
    """Write config, generation config, tokenizer and weights."""
    from transformers import GenerationConfig  # noqa: PLC0415  (slow to import)

    weights = tiny_weights(ModelConfig.from_hf(hf_config), seed)
    hf_config.save_pretrained(folder)
    GenerationConfig(bos_token_id=1, eos_token_id=list(END_IDS), pad_token_id=0).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = hf_config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    stored = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
