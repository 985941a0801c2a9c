"""The user's cache of prepared models: every entry is whole or not there, and is built by one process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from common.errors import ModelError

CACHE_VARIABLE = "SIXSTAGE_CACHE"
CONVERTER = 1  # raise it when conversion changes: cached results of an older one are then not used

Say = Callable[[str], None]
"""Takes one line of progress."""


def say(line: str) -> None:
    """Print a line of progress where it does not mix with answers."""
    print(line, file=sys.stderr, flush=True)


def cache_root() -> Path:
    """Folder of prepared models: `$SIXSTAGE_CACHE` if set, otherwise the platform's own place."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("sixstage", appauthor=False)).expanduser()


def megabytes(size: int) -> str:
    """A byte count for people (1 MB = 10^6 bytes)."""
    return f"{size / 1e6:.1f} MB"


def build_once(name: str, build: Callable[[Path], None], report: Say = say) -> Path:
    """Return the cache's folder `name`, made by `build` if it is not there yet.

    `build` fills a temporary folder beside the final one, which then takes the final name in one rename: a
    process that is killed at any moment leaves no half entry.  A lock lets one process build while others
    wait; whoever holds it may remove what killed builders left behind.

    Args:
        name: one path component.
        build: fills the empty folder that it is given.
        report: takes lines of progress.

    Raises:
        ModelError: the cache cannot be written.  Whatever `build` raises is passed on.
    """
    root = cache_root()
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{name}.lock")
        with suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            report(f"{name}: another process is preparing it, waiting")
            lock.acquire()
    except OSError as error:
        raise unwritable(root, error) from error
    try:
        if not target.is_dir():  # the process we waited for may have made it
            _build(target, build)
    finally:
        lock.release()
    return target


def unwritable(root: Path, error: OSError) -> ModelError:
    """The error for a cache that cannot be written, with the way out."""
    return ModelError(
        f"cache folder {root} cannot be written ({error.strerror or error}); "
        f"set {CACHE_VARIABLE} to a folder that can"
    )


def _build(target: Path, build: Callable[[Path], None]) -> None:
    """Run `build` in a temporary folder and give that the target's name.  The lock is held."""
    prefix = f".{target.name}.tmp-"
    for left_behind in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    scratch = target.parent / f"{prefix}{os.getpid()}"
    try:
        scratch.mkdir()
        build(scratch)
        scratch.rename(target)
    except OSError as error:
        raise unwritable(target.parent, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
