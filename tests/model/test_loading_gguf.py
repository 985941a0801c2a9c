"""GGUF files converted to ordinary folders: every tensor, the config, the tokenizer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from gguf_writing import write_gguf
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ModelError
from common.model import gguf
from common.model.gguf import convert_gguf
from common.model.loader import load_model, read_config
from common.model.zoo import make_tiny, tiny_tokenizer

# Rows of a multiple of 32, the block of GGUF's simple quantisations; head size is not hidden / heads.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
STRINGS = [
    "Hello",
    " Hello",
    "",
    "a  b",
    "naïve café",
    "🙂👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n",
    "the thing",
]


def original(tmp_path: Path, family: str, **overrides: object) -> Path:
    """A tiny model folder."""
    return make_tiny(family, tmp_path / "original", seed=3, **{**SHAPE, **overrides})


def converted(tmp_path: Path, name: str = "model.gguf") -> Path:
    """The folder that our converter makes of a GGUF file."""
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(tmp_path / name, folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    """What transformers makes of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"head_dim": 32}),
        ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_float32_file_gives_back_every_tensor(tmp_path: Path, family: str, overrides: dict) -> None:
    """B76: Llama's Q and K (bias too) lie in another order, each with its own head count; Qwen's do not."""
    folder = original(tmp_path, family, **overrides)
    expected = write_gguf(folder, tmp_path / "model.gguf")
    result = converted(tmp_path)
    found = load_file(result / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(logits(result), logits(folder))


def test_rows_of_a_head_in_llama_cpp_order() -> None:
    """B76, by hand: llama.cpp keeps what rotary embedding turns together side by side (0, D/2, 1, ...)."""
    stored = torch.tensor([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15])  # 2 heads of size 6
    assert gguf.undo_permutation(stored, 2).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    matrix = torch.stack((stored, -stored), dim=1)  # [12, 2]: whole rows move
    assert gguf.undo_permutation(matrix, 2)[:, 1].tolist() == [0, -1, -2, -3, -4, -5, *range(-10, -16, -1)]


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_file(tmp_path: Path, family: str, kind: GGMLQuantizationType) -> None:
    """Quantised matrices come out as the file's values in bfloat16, rows in the right order."""
    folder = original(tmp_path, family)
    expected = write_gguf(folder, tmp_path / "model.gguf", kind)
    result = converted(tmp_path)
    found = load_file(result / "model.safetensors")
    for name, tensor in expected.items():
        values = tensor
        if tensor.ndim == 2:  # blocks lie along a row, so quantising does not care for the order of rows
            values = torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
        assert torch.equal(found[name], values.bfloat16()), name
    assert AutoConfig.from_pretrained(result).dtype == torch.bfloat16


def test_float16_file_stays_float16(tmp_path: Path) -> None:
    """bfloat16 would lose three bits of every weight."""
    folder = make_tiny("llama", tmp_path / "original", dtype=torch.float16, **SHAPE)
    expected = write_gguf(folder, tmp_path / "model.gguf", GGMLQuantizationType.F16)
    found = load_file(converted(tmp_path) / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds one shard at a time; transformers and our loader read the shards through the index."""
    monkeypatch.setattr(gguf, "SHARD_BYTES", 60_000)
    folder = original(tmp_path, "llama")
    expected = write_gguf(folder, tmp_path / "model.gguf")
    result = converted(tmp_path)
    shards = sorted(result.glob("model-*.safetensors"))
    assert len(shards) > 2
    largest = max(tensor.nbytes for tensor in expected.values())
    assert all(sum(t.nbytes for t in load_file(s).values()) <= max(60_000, largest) for s in shards)
    assert torch.equal(logits(result), logits(folder))
    assert torch.equal(load_model(result, "float32").embedding, expected["model.embed_tokens.weight"])


def test_config(tmp_path: Path) -> None:
    """Shape, window and every end id (B100) come from the file's keys."""
    folder = original(tmp_path, "mistral", head_dim=32, sliding_window=24, max_position_embeddings=512)
    write_gguf(folder, tmp_path / "model.gguf", tokenizer=tiny_tokenizer())
    result = converted(tmp_path)
    config = read_config(result)
    reference = read_config(folder)
    assert config.sliding_windows == (24, 24)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    for field in ("architecture", "vocab_size", "head_dim", "num_kv_heads", "max_position_embeddings"):
        assert getattr(config, field) == getattr(reference, field), field
    assert config.rope_inv_freq == reference.rope_inv_freq
    assert config.eos_token_ids == {2, 0}
    assert GenerationConfig.from_pretrained(result).eos_token_id == [2, 0]


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    """Rope scaling keys become transformers' parameters."""
    folder = original(tmp_path, "qwen2")
    for kind in ("linear", "yarn"):
        keys = {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 4.0}
        if kind == "yarn":
            keys["qwen2.rope.scaling.original_context_length"] = 512
        write_gguf(folder, tmp_path / f"{kind}.gguf", extra=keys)
        target = tmp_path / kind
        target.mkdir()
        convert_gguf(tmp_path / f"{kind}.gguf", target)
        rope = AutoConfig.from_pretrained(target).rope_parameters
        assert rope["rope_type"] == kind
        assert rope["factor"] == 4.0
        assert rope["rope_theta"] == 10000.0
        assert rope.get("original_max_position_embeddings") == (512 if kind == "yarn" else None)


def test_llama3_scaling_is_recovered(tmp_path: Path) -> None:
    """GGUF stores Llama 3's scaling as a list of factors; the config gets the numbers behind them back."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    folder = original(tmp_path, "llama", head_dim=32, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder), "cpu")
    plain = 500000.0 ** (-torch.arange(0, 32, 2) / 32)
    factors = (plain / scaled).float().numpy()
    write_gguf(folder, tmp_path / "model.gguf", extra_tensors={"rope_freqs.weight": factors})
    result = converted(tmp_path)
    assert AutoConfig.from_pretrained(result).rope_parameters == pytest.approx(rope)
    write_gguf(folder, tmp_path / "odd.gguf", extra_tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ModelError, match=r"odd.gguf: rope_freqs.weight is not Llama 3's"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path)


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_tokenizer_ids(tmp_path: Path, add_bos: bool | None) -> None:
    """B79: same ids as the tokenizer that went in; a begin token only if the file's flag says so."""
    source = tiny_tokenizer()
    write_gguf(original(tmp_path, "llama"), tmp_path / "model.gguf", tokenizer=source, add_bos=add_bos)
    loaded = AutoTokenizer.from_pretrained(converted(tmp_path))
    begin = [source.bos_token_id] if add_bos else []
    for text in STRINGS:
        ids = source(text)["input_ids"]
        assert loaded(text)["input_ids"] == begin + ids, text
        assert loaded.decode(ids) == text
    chat = [{"role": "user", "content": "the thing"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == source.apply_chat_template(
        chat, tokenize=False
    )


def test_smollm_splits_out_digits(tmp_path: Path) -> None:
    """B79: spaces in front of a digit stay together ("smollm" split), which GPT-2's split would part."""
    source = tiny_tokenizer()
    state = json.loads(source.backend_tokenizer.to_str())
    assert ["Ġ", "Ġ"] not in state["model"]["merges"]  # so that what follows shows the split alone
    write_gguf(original(tmp_path, "llama"), tmp_path / "model.gguf", tokenizer=source, pre="smollm")
    loaded = AutoTokenizer.from_pretrained(converted(tmp_path))
    split = loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [piece for piece, _ in split("a  12b")] == ["a", "ĠĠ", "1", "2", "b"]


def test_file_without_tokenizer_still_converts(tmp_path: Path) -> None:
    """The weights are of use without one."""
    write_gguf(original(tmp_path, "qwen3"), tmp_path / "model.gguf")
    assert not (converted(tmp_path) / "tokenizer.json").exists()


@pytest.mark.parametrize("keep", [0, 3, 40, 0.02, 0.5, 0.999])
def test_cut_file_is_refused(tmp_path: Path, keep: float) -> None:
    """A download that broke off is one line, not a traceback from numpy."""
    write_gguf(original(tmp_path, "llama"), tmp_path / "whole.gguf", tokenizer=tiny_tokenizer())
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"cut\.gguf: not a whole GGUF file"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path)


def test_scrambled_header_is_refused(tmp_path: Path) -> None:
    """Any one byte of the header may be wrong: a ModelError or a result, never another exception."""
    write_gguf(original(tmp_path, "llama"), tmp_path / "whole.gguf")
    data = bytearray((tmp_path / "whole.gguf").read_bytes())
    messages = []
    for at in range(0, 1200, 61):
        broken = bytearray(data)
        broken[at] ^= 0xFF
        (tmp_path / "broken.gguf").write_bytes(broken)
        try:
            convert_gguf(tmp_path / "broken.gguf", tmp_path)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 5
    assert all("broken.gguf" in message and "\n" not in message for message in messages)


def test_missing_and_foreign_tensors_are_refused(tmp_path: Path) -> None:
    """By name: one that the architecture needs, one that it does not have."""
    folder = original(tmp_path, "llama")
    write_gguf(folder, tmp_path / "a.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"a.gguf: tensor model.layers.1.mlp.up_proj.weight is missing"):
        convert_gguf(tmp_path / "a.gguf", tmp_path)
    write_gguf(folder, tmp_path / "b.gguf", extra_tensors={"blk.0.ssm_a.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match=r"b.gguf: tensor blk.0.ssm_a.weight does not belong to Llama"):
        convert_gguf(tmp_path / "b.gguf", tmp_path)
    write_gguf(folder, tmp_path / "c.gguf", leave_out="token_embd.weight")
    with pytest.raises(ModelError, match=r"c.gguf: tensor token_embd.weight is missing"):
        convert_gguf(tmp_path / "c.gguf", tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "architecture llama with experts is not supported"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count 4 is not the head size 16"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling longrope is not supported"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
    ],
)
def test_what_we_do_not_have_is_refused(tmp_path: Path, extra: dict, message: str) -> None:
    """Rather an error than a model that computes something else."""
    write_gguf(original(tmp_path, "llama"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path)
