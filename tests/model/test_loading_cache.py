"""The cache of prepared models: whole entries or none, whatever is killed, whoever else builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model import cache
from common.model.cache import build_once, cache_root

# A process of its own that builds the entry "model": writes half, waits for the file "go", writes the rest.
BUILDER = """
import time
from common.model.cache import build_once, cache_root

def build(folder):
    (folder / "half").write_text("half")
    print("half", flush=True)
    while not (cache_root().parent / "go").exists():
        time.sleep(0.01)
    (folder / "rest").write_text("rest")

build_once("model", build)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("SIXSTAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start_builder() -> subprocess.Popen:
    """Start `BUILDER` and return once it has written half."""
    process = subprocess.Popen([sys.executable, "-c", BUILDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


def whole(folder: Path) -> None:
    """Build both files."""
    (folder / "half").write_text("half")
    (folder / "rest").write_text("rest")


def entries(root: Path) -> list[str]:
    """What the cache holds, locks aside."""
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_builds_once(root: Path) -> None:
    """The second call does not build."""
    assert build_once("model", whole) == root / "model"
    assert build_once("model", lambda folder: pytest.fail("built twice")) == root / "model"
    assert entries(root) == ["model"]


def test_failed_build_leaves_nothing(root: Path) -> None:
    """The builder's own error comes through, its half work goes."""

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ModelError("wrong sha256")

    with pytest.raises(ModelError, match=r"^wrong sha256$"):
        build_once("model", fail)
    assert entries(root) == []
    assert (build_once("model", whole) / "rest").is_file()


def test_killed_build_is_cleaned_up(root: Path) -> None:
    """Killed in the middle (SIGKILL): no entry, and the next start makes a whole one."""
    process = start_builder()
    process.kill()
    process.wait()
    assert "model" not in entries(root)
    assert len(entries(root)) == 1  # the half that it left
    build_once("model", whole)
    assert entries(root) == ["model"]
    assert sorted(os.listdir(root / "model")) == ["half", "rest"]


def test_two_processes_at_once(root: Path) -> None:
    """The second waits, says so, and takes what the first has made."""
    process = start_builder()
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        (root.parent / "go").write_text("")

    folder = build_once("model", lambda folder: pytest.fail("built twice"), report)
    assert (folder / "rest").is_file()
    assert lines == ["model: another process is preparing it, waiting"]
    assert process.wait() == 0
    assert entries(root) == ["model"]


def test_second_builds_if_first_is_killed_while_it_waits(root: Path) -> None:
    """The lock goes with its process; the waiting one takes over."""
    process = start_builder()
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        process.kill()

    assert (build_once("model", whole, report) / "rest").is_file()
    assert len(lines) == 1
    process.wait()
    assert entries(root) == ["model"]


def test_unwritable_cache_names_folder_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder's place, so that it fails for root as well."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("SIXSTAGE_CACHE", str(place))
        with pytest.raises(
            ModelError, match=r"cache folder .*file.* cannot be written \(.+\); set SIXSTAGE_CACHE"
        ):
            build_once("model", whole)


def test_full_disk_while_building(root: Path) -> None:
    """An OSError of the builder is about the cache: everything else it turns into a ModelError itself."""

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\)"):
        build_once("model", full)
    assert entries(root) == []


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable wins (with ~), otherwise the platform's own cache folder."""
    monkeypatch.setenv("SIXSTAGE_CACHE", "~/models")
    assert cache_root() == Path.home() / "models"
    monkeypatch.delenv("SIXSTAGE_CACHE")
    monkeypatch.setattr(cache, "user_cache_dir", lambda name, appauthor: str(tmp_path / name))
    assert cache_root() == tmp_path / "sixstage"
