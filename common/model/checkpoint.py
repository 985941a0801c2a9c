"""A folder of safetensors files as one lazy mapping from tensor name to tensor."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Checkpoint:
    """Tensors by name, each mapped from its file on its own.

    Where there is an index, a tensor comes from the shard that the index names for it and from nowhere
    else; other files in the folder do not count.

    safetensors would map a whole file and keep all pages that were ever touched until the last tensor of
    the file is gone, so that a load that repacks weights would hold them twice.  Here every tensor has a
    mapping of its own, which goes when the tensor goes, and of those still held the pages are given back
    whenever the next tensor is asked for (they are clean copies of the file; touching them reads it again).
    """

    def __init__(self, folder: Path) -> None:
        """Read the index and check the headers of all files.

        Raises:
            ModelError: a file is missing or not whole.  Messages name the file, not the folder.
        """
        self.folder = folder
        self.entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}  # name -> file, start of data, entry
        self.mapped: WeakSet[mmap.mmap] = WeakSet()  # of the tensors that are still in use
        weight_map = _weight_map(folder)
        headers = {file: _header(folder / file) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            start, header = headers[file]
            if name not in header:
                raise ModelError(f"{file}: tensor {name} is missing, though {INDEX} places it there")
            self.entries[name] = (folder / file, start, header[name])

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored, mapped from its file: nothing is read before it is touched.

        Raises:
            ModelError: there is none of that name, or its type is not one we compute with.
        """
        self.release()
        if name not in self.entries:
            raise ModelError(f"tensor {name} is missing")
        path, start, entry = self.entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ModelError(
                f"{path.name}: tensor {name} is {entry['dtype']}, there are {', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        if begin == end:
            return torch.empty(entry["shape"], dtype=dtype)
        before = (start + begin) % mmap.ALLOCATIONGRANULARITY  # a mapping starts at a page
        with path.open("rb") as file:
            # Copy on write, because torch has no read-only tensors; nobody writes, so nothing is copied.
            pages = mmap.mmap(
                file.fileno(), end - begin + before, access=mmap.ACCESS_COPY, offset=start + begin - before
            )
        self.mapped.add(pages)
        raw = torch.frombuffer(pages, dtype=torch.uint8, offset=before)
        if raw.data_ptr() % dtype.itemsize:  # an unpadded header puts the data anywhere
            raw = raw.clone()
        return raw.view(dtype).view(entry["shape"])

    def release(self) -> None:
        """Give back the pages of all tensors handed out so far; their values stay readable."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for pages in self.mapped:
                pages.madvise(mmap.MADV_DONTNEED)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = set(weight_map.values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{INDEX}: not an index of shards ({error})") from error
        for file in sorted(files):
            if not (folder / file).is_file():
                raise ModelError(f"shard {file} is missing, though {INDEX} names it")
        return weight_map
    if not (folder / SINGLE).is_file():
        raise ModelError(f"neither {SINGLE} nor {INDEX} is there")
    return dict.fromkeys(_header(folder / SINGLE)[1], SINGLE)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's data starts, in bytes, and what is said of each tensor; checked by the library."""
    try:
        with safe_open(path, framework="pt"):  # refuses a header that does not fit the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise ModelError(f"{path.name}: not a whole safetensors file ({error})") from error
    except OSError as error:
        raise ModelError(f"{path.name}: cannot be read ({error.strerror or error})") from error
    header.pop("__metadata__", None)
    return 8 + length, header
