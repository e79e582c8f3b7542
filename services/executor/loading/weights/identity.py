"""The identity of a checkpoint and of the state of our code, for everything that is kept between starts."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from pagewire.kernels import ops as kernel_ops

_MODEL_FILES = (".json", ".safetensors", ".gguf")
_WEIGHT_FILES = (".safetensors", ".gguf")
_SOURCES = (".py", ".h", ".cpp")
# The parts of a file of weights that are read: its whole beginning, which lists the tensors, and pieces of the rest.
_HEAD_BYTES = 1 << 20
_PIECES, _PIECE_BYTES = 4096, 1024


def model_key(path: Path) -> dict[str, Any]:
    """Returns an identity of files by their sizes and times, not their contents, which take longer to read than to
    load."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _MODEL_FILES)
    stats = {file.name: (stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]}
    return {"path": str(path.resolve()), "files": stats}


def content_digest(path: Path) -> str:
    """Returns an identity of a checkpoint's weights, independent of the path and age of its files. Hosts agree on it.

    The files are read in pieces, a kilobyte of each 4,096th part: a training step changes them all.
    """
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _WEIGHT_FILES)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(b"%d\n" % size)
            digest.update(os.pread(opened.fileno(), _HEAD_BYTES, 0))
            for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                digest.update(os.pread(opened.fileno(), _PIECE_BYTES, start))
    return digest.hexdigest()[:12]


@functools.cache
def code_digest() -> str:
    """Returns an identity of all code that converts a checkpoint to a device's form of weights. Takes milliseconds."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[2], Path(kernel_ops.__file__).parents[1]):
        for file in sorted(file for file in folder.rglob("*") if file.suffix in _SOURCES):
            digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
