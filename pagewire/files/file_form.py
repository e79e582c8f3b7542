"""Checks files of models by their own headers: a download that was cut off is seen without reading all of it."""

import json
import mmap
import struct
from pathlib import Path

from pagewire.errors import StartupError
from pagewire.files import gguf
from pagewire.files.damaged_file import remedy
from pagewire.files.model_files import weight_files

_MAX_HEADER = 100_000_000  # bytes, the limit of safetensors


def check_weights(path: Path) -> None:
    """Raises StartupError for a model with a file of weights that is cut off or not what its name says.

    path: the directory or .gguf file of the model.
    """
    try:
        for file in weight_files(path):
            if error := form_error(file, file.suffix):
                raise StartupError(f"{file}: {error}; {remedy(file)}")
    except OSError as error:
        raise StartupError(f"{error.filename or path} cannot be read ({error.strerror or error})") from error


def form_error(path: Path, suffix: str) -> str:
    """Returns the error in a file by its own header; "" if there is none, or no header. Raises OSError."""
    try:
        if suffix == ".safetensors":
            safetensors_names(path)
        elif suffix == ".gguf":
            _read_gguf(path)
        elif suffix == ".json":
            json.loads(path.read_bytes())
    except ValueError as error:  # from JSON, UTF-8, and the two functions below
        return str(error)
    return ""


def safetensors_names(path: Path) -> set[str]:
    """Returns the tensors in the file, and checks its length against the header. Raises ValueError and OSError.

    Format: https://github.com/huggingface/safetensors#format
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"its header cannot be read: {remedy(path)}")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0) + 8 + length
    except (AttributeError, KeyError, TypeError, IndexError):
        raise ValueError("its header names no tensors") from None
    if end != size:
        raise ValueError(f"it has {size} bytes, but {end} by its header")
    return set(header)


def _read_gguf(path: Path) -> None:
    """Checks a GGUF file. Raises ValueError and OSError."""
    if not path.stat().st_size:
        raise ValueError("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = gguf.read_header(data, skip_string_arrays=True)
        for entry in header.tensors:
            if header.data_offset + entry.offset >= len(data):
                raise ValueError(f"it ends before tensor {entry.name!r}")
