"""Writes tiny GGUF files the way llama.cpp's converter does, for the tests of our reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a transformers tensor."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's Q and K."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    folder: Path,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    leave_out: str | None = None,
    tokenizer: Any = None,
    add_bos: bool | None = None,
    pre: str = "gpt-2",
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a model folder as GGUF.

    Args:
        folder: with config.json and model.safetensors.
        path: of the file.
        kind: type of the matrices; norms and biases are float32.
        leave_out: GGUF name of a tensor that is not written.
        tokenizer: a byte-level transformers tokenizer, None for a file without one.
        add_bos: the file's flag, None leaves it out.
        pre: name of the tokenizer's split.
        extra: further metadata, integers, floats or strings, under full keys.
        extra_tensors: further float32 tensors.

    Returns:
        transformers' name -> the values that the file holds, in transformers' order.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    arch = {"mistral": "llama"}.get(family, family)
    writer = GGUFWriter(path, arch)
    _write_metadata(writer, config)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer, add_bos, pre)
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kept = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        kept[name] = tensor.clone()
        if gguf_name(name) == leave_out:
            continue
        values = tensor.float().numpy()
        projection = name.split(".")[-2]
        permuted = arch == "llama" and projection in heads
        if permuted:
            values = permute(values, heads[projection])
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
            continue
        packed = quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _write_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "mistral":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _write_tokenizer(writer: GGUFWriter, tokenizer: Any, add_bos: bool | None, pre: str) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = {token["content"] for token in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
