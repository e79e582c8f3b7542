"""The identity of a checkpoint and of the state of our code, for everything that is kept between starts."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from pagewire.files.model_files import weight_files, weights_digest
from pagewire.kernels import ops as kernel_ops

_MODEL_FILES = (".json", ".safetensors", ".gguf")
_SOURCES = (".py", ".h", ".cpp")


def model_key(path: Path) -> dict[str, Any]:
    """Returns an identity of files by their sizes and times, not their contents, which take longer to read than to
    load."""
    if path.is_file():
        files = weight_files(path)
    else:
        files = sorted(file for file in path.iterdir() if file.suffix in _MODEL_FILES)
    stats = {file.name: (stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]}
    return {"path": str(path.resolve()), "files": stats}


def content_digest(path: Path) -> str:
    """Returns the version of a checkpoint's weights: the beginning of their digest."""
    return weights_digest(path)[:12]


@functools.cache
def code_digest() -> str:
    """Returns an identity of all code that converts a checkpoint to a device's form of weights. Takes milliseconds."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[2], Path(kernel_ops.__file__).parents[1]):
        for file in sorted(file for file in folder.rglob("*") if file.suffix in _SOURCES):
            digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
