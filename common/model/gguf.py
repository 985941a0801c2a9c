"""Turn a GGUF file into an ordinary folder: config, generation config, tokenizer, safetensors.

Weights are read tensor by tensor, so that memory holds one shard at most, whatever the file's size.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import ModelError
from common.model.config import ModelConfig
from common.model.gguf_config import PERMUTED, read_config
from common.model.gguf_tokenizer import save_tokenizer
from common.model.shapes import tensor_shapes

SHARD_BYTES = 2_000_000_000

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, which then loads like any other.

    Args:
        path: the file, of one of `gguf_config.GGUF_ARCHITECTURES`.
        folder: exists.

    Raises:
        ModelError: the file is corrupt, incomplete, or of an architecture or quantisation we do not have.
    """
    reader = _open(path)
    metadata = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.ggml.") or len(field.data) == 1  # not the vocabulary
    }
    names = {tensor.name: tensor for tensor in reader.tensors}
    config, generation_config = read_config(path, metadata, names)
    config.dtype = _storage_dtype(reader)
    _write_weights(path, reader, config, folder)
    config.save_pretrained(folder)
    generation_config.save_pretrained(folder)
    if "tokenizer.ggml.tokens" in reader.fields:
        save_tokenizer(path, metadata, config.max_position_embeddings, folder)


def _open(path: Path) -> Any:
    """The file's reader, its header checked."""
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"{path}: not a whole GGUF file ({error})") from error


def hf_name(name: str) -> str | None:
    """Transformers' name of a GGUF tensor, None if there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _PER_LAYER:
        return f"model.layers.{layer[1]}.{_PER_LAYER[layer[2]]}.{kind}"
    return None


def undo_permutation(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put the rows of a Llama Q or K projection back in transformers' order.

    Within a head, llama.cpp keeps the two numbers that rotary embedding turns together side by side
    (0, D/2, 1, D/2 + 1, ...); transformers keeps them half a head apart.

    Args:
        rows: `[heads * D, hidden]`, or `[heads * D]` for a bias.
        num_heads: of this projection: query heads for Q, key heads for K.
    """
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, D / 2, 2, hidden]
    return paired.transpose(1, 2).reshape(rows.shape)  # [heads * D, hidden]


def _write_weights(path: Path, reader: Any, config: Any, folder: Path) -> None:
    """Convert tensor by tensor into one safetensors file, or into shards with an index."""
    expected = tensor_shapes(ModelConfig.from_hf(config))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    shards = _ShardWriter(folder)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":  # part of the config
            continue
        name = hf_name(tensor.name)
        shape = expected.pop(name, None) if name else None
        if name is None or shape is None:
            raise ModelError(f"{path}: tensor {tensor.name} does not belong to {config.architectures[0]}")
        weight = _dequantised(path, tensor)
        if tuple(weight.shape) != shape:
            raise ModelError(
                f"{path}: tensor {tensor.name} has shape {list(weight.shape)}, not {list(shape)}"
            )
        projection = name.split(".")[-2]
        if config.model_type in PERMUTED and projection in heads:
            weight = undo_permutation(weight, heads[projection])
        shards.add(name, weight.to(config.dtype))
    if expected:
        raise ModelError(f"{path}: tensor {next(iter(expected))} is missing")
    shards.close()


def _dequantised(path: Path, tensor: Any) -> torch.Tensor:
    """A tensor's values in float32, in transformers' shape (GGUF counts dimensions from the inside)."""
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(f"{path}: no reader for {tensor.tensor_type.name} ({tensor.name})") from error
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _storage_dtype(reader: Any) -> torch.dtype:
    """The widest plain type among the matrices, bfloat16 if all are quantised.

    Norm weights do not count: they are in float32 in every GGUF file.
    """
    plain = {
        _PLAIN_TYPES.get(tensor.tensor_type, torch.bfloat16)
        for tensor in reader.tensors
        if len(tensor.shape) > 1
    }
    return next((dtype for dtype in (torch.float32, torch.float16) if dtype in plain), torch.bfloat16)


class _ShardWriter:
    """Collects tensors and writes a file whenever it holds `SHARD_BYTES`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: list[list[str]] = []  # names of the tensors in each file
        self.total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        if sum(held.nbytes for held in self.tensors.values()) + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self.tensors[name] = tensor.contiguous()
        self.total += tensor.nbytes

    def _flush(self) -> None:
        if self.tensors:
            try:
                save_file(self.tensors, self.folder / f"shard-{len(self.shards)}", metadata={"format": "pt"})
            except SafetensorError as error:  # its word for a full disk
                raise OSError(str(error)) from error
            self.shards.append(list(self.tensors))
            self.tensors = {}

    def close(self) -> None:
        """Write what is left, then give the files the names that hang on their count."""
        self._flush()
        count = len(self.shards)
        if count == 1:
            (self.folder / "shard-0").rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self.shards):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            (self.folder / f"shard-{i}").rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2), encoding="utf-8"
        )
