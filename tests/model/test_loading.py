"""From a name to a decoder: what is taken, and what is refused in which words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf_writing import write_gguf
from transformers import GenerationConfig

from common.errors import InvalidValue, ModelError
from common.model import loader
from common.model.loader import load_model, load_tokenizer, resolve, resolve_device, resolve_dtype
from common.model.zoo import make_tiny, tiny_tokenizer

CPU = torch.device("cpu")


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# The config


@pytest.mark.parametrize("text", ["", "not json", "[1]"])
def test_broken_config(tiny_folder: Path, text: str) -> None:
    """One line that names the file."""
    (tiny_folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=f"{tiny_folder}: config.json: not "):
        load_model(tiny_folder)


def test_missing_config(tiny_folder: Path) -> None:
    """Likewise."""
    (tiny_folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: cannot be read"):
        load_model(tiny_folder)


@pytest.mark.parametrize("value", ["many", None, -3])
def test_config_with_a_wrong_value(tiny_folder: Path, value: object) -> None:
    """Whatever transformers says of it becomes one line."""
    edit_json(tiny_folder / "config.json", num_hidden_layers=value)
    with pytest.raises(ModelError) as caught:
        load_model(tiny_folder)
    assert "\n" not in str(caught.value)
    assert str(tiny_folder) in str(caught.value)


@pytest.mark.parametrize("changes", [{"architectures": ["MambaForCausalLM"]}, {"architectures": None}])
def test_unknown_architecture(tiny_folder: Path, changes: dict) -> None:
    """Refused by name with the list of those there are, and no code of the folder is run."""
    edit_json(
        tiny_folder / "config.json", model_type="mamba", auto_map={"AutoConfig": "evil.Config"}, **changes
    )
    (tiny_folder / "evil.py").write_text("raise SystemExit('ran')")
    allowed = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    with pytest.raises(ModelError, match=f"architecture: got '(mamba|MambaForCausalLM)', allowed: {allowed}"):
        load_model(tiny_folder)


def test_quantised_checkpoint(tiny_folder: Path) -> None:
    """Its integers would be taken for weights."""
    edit_json(tiny_folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="quantization_config: got 'gptq'"):
        load_model(tiny_folder)


@pytest.mark.parametrize("ids", [7, [2, 7], [7, 2]])
def test_end_ids_of_both_configs(tiny_folder: Path, ids: int | list[int]) -> None:
    """B100: the generation config's list or single int counts, and the config's as well."""
    GenerationConfig(eos_token_id=ids).save_pretrained(tiny_folder)
    assert load_model(tiny_folder).config.eos_token_ids == {2, 7}
    (tiny_folder / "generation_config.json").unlink()
    assert load_model(tiny_folder).config.eos_token_ids == {2}


def test_tokenizer_with_other_size_than_the_logits(tiny_folder: Path) -> None:
    """B82: logits are wider (ids above decode to nothing); B83: added ids above vocab_size are logits too."""
    tokenizer = load_tokenizer(tiny_folder)
    model = load_model(tiny_folder)
    assert len(tokenizer) < model.config.vocab_size
    assert tokenizer.hf.decode([tokenizer.hf.convert_tokens_to_ids("t"), model.config.vocab_size - 1]) == "t"
    hf = tiny_tokenizer()
    hf.add_tokens([f"<extra_{i}>" for i in range(300 - len(hf) + 2)])
    hf.save_pretrained(tiny_folder)
    wide = make_tiny("qwen2", tiny_folder.parent / "wide", vocab_size=320)
    hf.save_pretrained(wide)
    assert load_model(wide).config.vocab_size == 320  # not the tokenizer's 302
    assert len(load_tokenizer(wide)) == 302


# Names


def test_gguf_file_by_path(tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Converted once; again when the file has changed."""
    path = tmp_path / "my model.gguf"
    expected = write_gguf(tiny_folder, path, tokenizer=tiny_tokenizer())
    first = resolve(path)
    assert first.parent == tmp_path / "cache"
    assert "converting" in capfd.readouterr().err
    assert resolve(str(path)) == first
    assert capfd.readouterr().err == ""
    assert torch.equal(load_model(path, "float32").norm, expected["model.norm.weight"])
    assert load_tokenizer(path).eos_token_id == 2
    os.utime(path, ns=(1, 1))
    assert resolve(path) != first


def test_corrupt_gguf_leaves_nothing(tmp_path: Path, tiny_folder: Path) -> None:
    """One line, and no folder in the cache."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"bad.gguf: not a whole GGUF file"):
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


def test_local_folder_with_the_shape_of_a_hub_id(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is taken, and the hub is not asked."""
    monkeypatch.chdir(tiny_folder.parent.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert resolve(f"{tiny_folder.parent.name}/model") == Path(tiny_folder.parent.name, "model")


def test_hub_id(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the loader reads is downloaded; the hub's folder is taken as it is."""
    asked = {}

    def download(name: str, **patterns: list[str]) -> str:
        asked[name] = patterns
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/some-model_1.5") == tiny_folder
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
        with pytest.raises(InvalidValue, match=r"dtype: got .*, allowed: auto, float32, bfloat16"):
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
def test_loaded_dtype(tiny_folder: Path, dtype: str) -> None:
    """The decoder computes in what was asked for."""
    assert load_model(tiny_folder, dtype).dtype == getattr(torch, dtype)
