"""The seal of a compiled library: a digest at its end.

A library that was cut short would be loaded, and end the process when used.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

__all__ = ["open_sealed", "seal"]

# The library in its file is followed by this and its SHA-256.
_SEAL = b"pagewire kernels\0"


def seal(path: Path) -> None:
    """Appends the seal. Raises OSError."""
    path.write_bytes(_sealed(path.read_bytes()))


def open_sealed(path: Path) -> ctypes.CDLL:
    """Loads a library that is complete. Raises OSError."""
    content = path.read_bytes()
    if content != _sealed(content[: -len(_SEAL) - hashlib.sha256().digest_size]):
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


def _sealed(library: bytes) -> bytes:
    return library + _SEAL + hashlib.sha256(library).digest()
