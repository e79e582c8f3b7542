"""The identity of a checkpoint and of the state of our code, for everything that is kept between starts."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from pagewire.kernels import ops as kernel_ops

_MODEL_FILES = (".json", ".safetensors", ".gguf")
_SOURCES = (".py", ".h", ".cpp")


def model_key(path: Path) -> dict[str, Any]:
    """Which files, of which sizes and times: not their contents, which take longer to read than to load."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _MODEL_FILES)
    stats = {file.name: (stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]}
    return {"path": str(path.resolve()), "files": stats}


@functools.cache
def code_digest() -> str:
    """Of all code that turns a checkpoint into what a device multiplies with. Takes milliseconds."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[2], Path(kernel_ops.__file__).parents[1]):
        for file in sorted(file for file in folder.rglob("*") if file.suffix in _SOURCES):
            digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
