"""Writing a result: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import SixstageError


def write_file(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, in a folder that is made if need be.

    Raises:
        SixstageError: the file cannot be written; nothing half-written is left.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        if path.parent.is_dir():
            scratch.unlink(missing_ok=True)
        raise SixstageError(f"cannot write {path}: {error.strerror}") from error
