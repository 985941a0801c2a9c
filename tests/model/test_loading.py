"""From a name to a decoder: what is taken, what is refused and in which words, and how safetensors are read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf_writing import write_gguf
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from common.errors import InvalidValue, ModelError
from common.model import loader
from common.model.checkpoint import INDEX, Checkpoint
from common.model.loader import load_model, load_tokenizer, resolve, resolve_device, resolve_dtype
from common.model.zoo import make_tiny, tiny_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Qwen2 (head not tied) in one file, and an empty cache."""
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path / "cache"))
    return make_tiny("qwen2", tmp_path / "model")


def split_in_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a folder in two shards with an index; return all tensors."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    (folder / "model.safetensors").unlink()
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        halves[i % 2][name] = tensor
        weight_map[name] = f"model-{i % 2 + 1:05}-of-00002.safetensors"
    for i, half in enumerate(halves):
        save_file(half, folder / f"model-{i + 1:05}-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Reading safetensors


def test_one_file(folder: Path) -> None:
    """Every tensor as safetensors itself reads it, in the stored dtype."""
    checkpoint = Checkpoint(folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
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
        assert torch.equal(Checkpoint(tmp_path).get("w"), tensor)


def test_tensors_outlive_the_checkpoint(folder: Path) -> None:
    """Giving pages back and closing files does not change a tensor that is still held."""
    expected = load_file(folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    held = {name: checkpoint.get(name) for name in expected}
    checkpoint.release()
    del checkpoint
    assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_shards_by_index_and_stray_files(folder: Path) -> None:
    """B80: with an index only the shard that it names counts, not an old single file nor a second copy."""
    tensors = split_in_shards(folder)
    wrong = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    save_file(wrong, folder / "model.safetensors")
    save_file(wrong, folder / "adapter.safetensors")
    second = folder / "model-00002-of-00002.safetensors"
    both = load_file(second) | {"model.norm.weight": wrong["model.norm.weight"]}
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    first = folder / "model-00001-of-00002.safetensors"
    save_file(load_file(first) | {"model.norm.weight": tensors["model.norm.weight"]}, first)
    save_file(both, second)
    checkpoint = Checkpoint(folder)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.get(name), tensor), name
    assert torch.equal(load_model(folder, "float32").norm, tensors["model.norm.weight"])


def test_missing_shard(folder: Path) -> None:
    """B80: named, with the folder."""
    split_in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=f"{folder}: shard model-00002-of-00002.safetensors is missing"):
        load_model(folder)


def test_tensor_that_index_and_shard_disagree_about(folder: Path) -> None:
    """The index places it where it is not."""
    split_in_shards(folder)
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    other = {"1": "model-00002-of-00002.safetensors", "2": "model-00001-of-00002.safetensors"}[file[10]]
    index["weight_map"]["model.norm.weight"] = other
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"{other}: tensor model.norm.weight is missing"):
        load_model(folder)


def test_missing_tensor(folder: Path) -> None:
    """Named, not a KeyError."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items() if "1.mlp.up_proj" not in name}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{folder}: .*model.layers.1.mlp.up_proj.weight is missing"):
        load_model(folder)


def test_tensor_of_wrong_shape(folder: Path) -> None:
    """Named with both shapes, also where the number of elements is right."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].t().contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name}.*\[80, 48\].*\[48, 80\]"):
        load_model(folder)


def test_tensor_of_a_type_we_do_not_compute_with(folder: Path) -> None:
    """Integers are a quantised checkpoint that nothing else gave away."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="tensor model.norm.weight is I8, there are F64, F32, F16, BF16"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_cut_safetensors(folder: Path, keep: int) -> None:
    """A copy that broke off, at any place."""
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_broken_index(folder: Path, text: str) -> None:
    """One line."""
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match=f"{INDEX}: not an index of shards"):
        load_model(folder)


def test_no_weights(folder: Path) -> None:
    """A folder with nothing to load."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_model(folder)


# The config


@pytest.mark.parametrize("text", ["", "not json", "[1]"])
def test_broken_config(folder: Path, text: str) -> None:
    """One line that names the file."""
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=f"{folder}: config.json: not "):
        load_model(folder)


def test_missing_config(folder: Path) -> None:
    """Likewise."""
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="config.json: cannot be read"):
        load_model(folder)


@pytest.mark.parametrize("value", ["many", None, -3])
def test_config_with_a_wrong_value(folder: Path, value: object) -> None:
    """Whatever transformers says of it becomes one line."""
    edit_json(folder / "config.json", num_hidden_layers=value)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("changes", [{"architectures": ["MambaForCausalLM"]}, {"architectures": None}])
def test_unknown_architecture(folder: Path, changes: dict) -> None:
    """Refused by name with the list of those there are, and no code of the folder is run."""
    edit_json(folder / "config.json", model_type="mamba", auto_map={"AutoConfig": "evil.Config"}, **changes)
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    allowed = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    with pytest.raises(ModelError, match=f"architecture: got '(mamba|MambaForCausalLM)', allowed: {allowed}"):
        load_model(folder)


def test_quantised_checkpoint(folder: Path) -> None:
    """Its integers would be taken for weights."""
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="quantization_config: got 'gptq'"):
        load_model(folder)


@pytest.mark.parametrize("ids", [7, [2, 7], [7, 2]])
def test_end_ids_of_both_configs(folder: Path, ids: int | list[int]) -> None:
    """B100: the generation config's list or single int counts, and the config's as well."""
    GenerationConfig(eos_token_id=ids).save_pretrained(folder)
    assert load_model(folder).config.eos_token_ids == {2, 7}
    (folder / "generation_config.json").unlink()
    assert load_model(folder).config.eos_token_ids == {2}


def test_tokenizer_with_other_size_than_the_logits(folder: Path) -> None:
    """B82: logits are wider (ids above decode to nothing); B83: added ids above vocab_size are logits too."""
    tokenizer = load_tokenizer(folder)
    model = load_model(folder)
    assert len(tokenizer) < model.config.vocab_size
    assert tokenizer.hf.decode([tokenizer.hf.convert_tokens_to_ids("t"), model.config.vocab_size - 1]) == "t"
    hf = tiny_tokenizer()
    hf.add_tokens([f"<extra_{i}>" for i in range(300 - len(hf) + 2)])
    hf.save_pretrained(folder)
    wide = make_tiny("qwen2", folder.parent / "wide", vocab_size=320)
    hf.save_pretrained(wide)
    assert load_model(wide).config.vocab_size == 320  # not the tokenizer's 302
    assert len(load_tokenizer(wide)) == 302


# Names


def test_gguf_file_by_path(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Converted once; again when the file has changed."""
    path = tmp_path / "my model.gguf"
    expected = write_gguf(folder, path, tokenizer=tiny_tokenizer())
    first = resolve(path)
    assert first.parent == tmp_path / "cache"
    assert "converting" in capfd.readouterr().err
    assert resolve(str(path)) == first
    assert capfd.readouterr().err == ""
    assert torch.equal(load_model(path, "float32").norm, expected["model.norm.weight"])
    assert load_tokenizer(path).eos_token_id == 2
    os.utime(path, ns=(1, 1))
    assert resolve(path) != first


def test_corrupt_gguf_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    """One line, and no folder in the cache."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match="bad.gguf: not a whole GGUF file"):
        load_model(tmp_path / "bad.gguf")
    assert [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == []


@pytest.mark.parametrize(
    "name", ["", "gpt5", "tiny-gpt2", "no/such/folder", "file.gguf", "/no/such", "a b/c"]
)
def test_unknown_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what is accepted."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(name)
    for accepted in ("smollm2-135m", "tiny-qwen3", "folder", ".gguf", "org/name"):
        assert accepted in str(caught.value)


def test_local_folder_with_the_shape_of_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is taken, and the hub is not asked."""
    monkeypatch.chdir(folder.parent.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert resolve(f"{folder.parent.name}/model") == Path(folder.parent.name, "model")


def test_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the loader reads is downloaded; the hub's folder is taken as it is."""
    asked = {}

    def download(name: str, **patterns: list[str]) -> str:
        asked[name] = patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/some-model_1.5") == folder
    keep = huggingface_hub.utils.filter_repo_objects(
        [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer.model",
            "chat_template.jinja",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "onnx/model.safetensors",
            "model.gguf",
        ],
        **asked["org/some-model_1.5"],
    )
    assert sorted(keep) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
    ]


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline is one line."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match="org/name: no such folder, and not fetched from the hub: "
    ) as caught:
        load_model("org/name")
    assert "\n" not in str(caught.value)


# dtype and device


def test_dtypes_by_name_and_as_they_are() -> None:
    """Both ways to say it."""
    assert resolve_dtype("float16", CPU) == torch.float16
    assert resolve_dtype(torch.float64, CPU) == torch.float64
    for wrong in ("int8", torch.int8, "bf16", ""):
        with pytest.raises(InvalidValue, match="dtype: got .*, allowed: auto, float32, bfloat16"):
            resolve_dtype(wrong, CPU)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_follows_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict, expected: torch.dtype
) -> None:
    """bfloat16 only where there are instructions for it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert resolve_dtype("auto", CPU) == expected


def test_auto_dtype_on_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the public function the private one is asked, and without both it is float32."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert loader.cpu_has_bfloat16()
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert not loader.cpu_has_bfloat16()


@pytest.mark.parametrize("gpu", [True, False])
def test_devices(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    """The GPU if there is one; one that is not there is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert resolve_device("auto").type == ("cuda" if gpu else "cpu")
    assert resolve_device(torch.device("cpu")).type == "cpu"
    for wrong in ("gpu", "xpu", "meta") + (() if gpu else ("cuda", "cuda:1")):
        with pytest.raises(InvalidValue, match=f"device: got '{wrong}', allowed: 'auto', 'cpu'"):
            resolve_device(wrong)


def test_dtype_is_checked_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error costs no download."""
    monkeypatch.setattr(loader, "resolve", lambda name: pytest.fail("fetched"))
    with pytest.raises(InvalidValue):
        load_model("smollm2-135m", dtype="float31")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_loaded_dtype(folder: Path, dtype: str) -> None:
    """The decoder computes in what was asked for."""
    assert load_model(folder, dtype).dtype == getattr(torch, dtype)
