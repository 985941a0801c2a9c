"""Safetensors folders: one file or shards by index, each tensor from where it belongs, and what is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ModelError
from common.model.checkpoint import INDEX, Checkpoint
from common.model.loader import load_model
from common.model.zoo import make_tiny


def split_in_shards(tiny_folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a folder in two shards with an index; return all tensors."""
    tensors = load_file(tiny_folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    (tiny_folder / "model.safetensors").unlink()
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        halves[i % 2][name] = tensor
        weight_map[name] = f"model-{i % 2 + 1:05}-of-00002.safetensors"
    for i, half in enumerate(halves):
        save_file(half, tiny_folder / f"model-{i + 1:05}-of-00002.safetensors")
    (tiny_folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_one_file(tiny_folder: Path) -> None:
    """Every tensor as safetensors itself reads it, in the stored dtype."""
    checkpoint = Checkpoint(tiny_folder)
    for name, tensor in load_file(tiny_folder / "model.safetensors").items():
        assert torch.equal(checkpoint.get(name), tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_stored_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    """All float types that we compute with."""
    make_tiny("llama", tmp_path, dtype=dtype)
    expected = load_file(tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path).get("model.norm.weight")
    assert found.dtype == dtype
    assert torch.equal(found, expected["model.norm.weight"])


def test_data_at_an_odd_place(tmp_path: Path) -> None:
    """A header without padding is legal: the data may start at any byte."""
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    for pad in range(4):
        entry = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
        header = json.dumps(entry).encode() + b" " * pad
        data = len(header).to_bytes(8, "little") + header + tensor.numpy().tobytes()
        (tmp_path / "model.safetensors").write_bytes(data)
        found = Checkpoint(tmp_path).get("w")
        assert torch.equal(found, tensor)
        assert found.data_ptr() % tensor.itemsize == 0


def test_tensors_outlive_the_checkpoint(tiny_folder: Path) -> None:
    """Giving pages back and closing files does not change a tensor that is still held."""
    expected = load_file(tiny_folder / "model.safetensors")
    checkpoint = Checkpoint(tiny_folder)
    held = {name: checkpoint.get(name) for name in expected}
    checkpoint.release()
    del checkpoint
    assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_shards_by_index_and_stray_files(tiny_folder: Path) -> None:
    """B80: with an index only the shard that it names counts, not an old single file nor a second copy."""
    tensors = split_in_shards(tiny_folder)
    wrong = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    save_file(wrong, tiny_folder / "model.safetensors")
    save_file(wrong, tiny_folder / "adapter.safetensors")
    second = tiny_folder / "model-00002-of-00002.safetensors"
    both = load_file(second) | {"model.norm.weight": wrong["model.norm.weight"]}
    index = json.loads((tiny_folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    (tiny_folder / INDEX).write_text(json.dumps(index))
    first = tiny_folder / "model-00001-of-00002.safetensors"
    save_file(load_file(first) | {"model.norm.weight": tensors["model.norm.weight"]}, first)
    save_file(both, second)
    checkpoint = Checkpoint(tiny_folder)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.get(name), tensor), name
    assert torch.equal(load_model(tiny_folder, "float32").norm, tensors["model.norm.weight"])


def test_missing_shard(tiny_folder: Path) -> None:
    """B80: named, with the folder."""
    split_in_shards(tiny_folder)
    (tiny_folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=f"{tiny_folder}: shard model-00002-of-00002.safetensors is missing"):
        load_model(tiny_folder)


def test_tensor_that_index_and_shard_disagree_about(tiny_folder: Path) -> None:
    """The index places it where it is not."""
    split_in_shards(tiny_folder)
    index = json.loads((tiny_folder / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    other = {"1": "model-00002-of-00002.safetensors", "2": "model-00001-of-00002.safetensors"}[file[10]]
    index["weight_map"]["model.norm.weight"] = other
    (tiny_folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"{other}: tensor model.norm.weight is missing"):
        load_model(tiny_folder)


def test_missing_tensor(tiny_folder: Path) -> None:
    """Named, not a KeyError."""
    tensors = load_file(tiny_folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items() if "1.mlp.up_proj" not in name}
    save_file(tensors, tiny_folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{tiny_folder}: .*model.layers.1.mlp.up_proj.weight is missing"):
        load_model(tiny_folder)


def test_tensor_of_wrong_shape(tiny_folder: Path) -> None:
    """Named with both shapes, also where the number of elements is right."""
    tensors = {name: tensor.clone() for name, tensor in load_file(tiny_folder / "model.safetensors").items()}
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].t().contiguous()
    save_file(tensors, tiny_folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name}.*\[80, 48\].*\[48, 80\]"):
        load_model(tiny_folder)


def test_tensor_of_a_type_we_do_not_compute_with(tiny_folder: Path) -> None:
    """Integers are a quantised checkpoint that nothing else gave away."""
    tensors = {name: tensor.clone() for name, tensor in load_file(tiny_folder / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tiny_folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model.norm.weight is I8, there are F64, F32, F16, BF16"):
        load_model(tiny_folder)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_cut_safetensors(tiny_folder: Path, keep: int) -> None:
    """A copy that broke off, at any place."""
    data = (tiny_folder / "model.safetensors").read_bytes()
    (tiny_folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
        load_model(tiny_folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_broken_index(tiny_folder: Path, text: str) -> None:
    """One line."""
    (tiny_folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match=f"{INDEX}: not an index of shards"):
        load_model(tiny_folder)


def test_no_weights(tiny_folder: Path) -> None:
    """A folder with nothing to load."""
    (tiny_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_model(tiny_folder)
