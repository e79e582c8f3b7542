"""A model as its files describe it: format, architecture, size, parameters and the digest of its weights."""

import hashlib
import json
import math
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.files.gguf import read_header
from pagewire.files.json_file import read_json_object

_WEIGHT_FILES = (".safetensors", ".gguf")
# The parts of a file of weights that are read: its whole beginning, which lists the tensors, and pieces of the rest.
_HEAD_BYTES = 1 << 20
_PIECES, _PIECE_BYTES = 4096, 1024
# Of the header of a safetensors file; real ones have some megabytes.
_MAX_HEADER_BYTES = 100 << 20
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# llama.cpp's numbers in general.file_type.
_GGUF_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip


@dataclass(frozen=True)
class ModelFiles:
    """A description of a model by its files. Numbers that they do not have are 0, texts are empty."""

    format: str  # "gguf" or "safetensors"
    architecture: str
    size: int  # bytes of the weights
    digest: str  # see weights_digest()
    modified: float  # Unix time of the latest one
    num_parameters: int = 0
    quantization: str = ""
    trained_len: int = 0  # tokens
    hidden_size: int = 0
    num_layers: int = 0


def weight_files(path: Path) -> list[Path]:
    """Returns the files that hold the weights of a model: those of a directory, or a .gguf file with its splits."""
    if path.is_file():
        return gguf_splits(path)
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHT_FILES)


def gguf_splits(path: Path) -> list[Path]:
    """Returns the files of a model in several .gguf files, of which `path` is one; of any other, the file itself."""
    if (found := _SPLIT.fullmatch(path.name)) is None:
        return [path]
    stem, _, count = found.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def weights_digest(path: Path) -> str:
    """Returns an identity of a model's weights, independent of the path and age of its files, as 64 hexadecimal digits.
    Hosts agree on it.

    The files are read in pieces, a kilobyte of each 4,096th part: a training step changes them all.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        with file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(b"%d\n" % size)
            digest.update(os.pread(opened.fileno(), _HEAD_BYTES, 0))
            for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                digest.update(os.pread(opened.fileno(), _PIECE_BYTES, start))
    return digest.hexdigest()


def describe_files(path: Path) -> ModelFiles:
    """Returns what the files of a model say. path: a directory or a .gguf file. Raises ValueError or OSError."""
    files = weight_files(path)
    if not files:
        raise ValueError(f"{path}: there are no weights")
    stats = [file.stat() for file in files]
    common: dict[str, Any] = {
        "size": sum(stat.st_size for stat in stats),
        "digest": weights_digest(path),
        "modified": max(stat.st_mtime for stat in stats),
    }
    if files[0].suffix == ".gguf":
        return ModelFiles(format="gguf", **common, **_of_gguf(files))
    return ModelFiles(format="safetensors", **common, **_of_directory(path, files))


def _of_gguf(files: Sequence[Path]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    num_parameters = 0
    for file in reversed(files):  # the first one has all metadata
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = read_header(data, skip_string_arrays=True)
        metadata = header.metadata
        num_parameters += sum(math.prod(tensor.shape) for tensor in header.tensors)
    architecture = str(metadata.get("general.architecture", ""))
    return {
        "architecture": architecture,
        "num_parameters": num_parameters,
        "quantization": _GGUF_TYPES.get(_number(metadata, "general.file_type", -1), ""),
        "trained_len": _number(metadata, f"{architecture}.context_length"),
        "hidden_size": _number(metadata, f"{architecture}.embedding_length"),
        "num_layers": _number(metadata, f"{architecture}.block_count"),
    }


def _of_directory(path: Path, files: Iterable[Path]) -> dict[str, Any]:
    keys = read_json_object(path / "config.json")
    text = keys.get("text_config")
    keys = {**text, **keys} if isinstance(text, dict) else keys
    counts: Counter[str] = Counter()
    for file in files:
        counts.update(_parameters_by_type(file))
    quantization = keys.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return {
        "architecture": str(keys.get("model_type") or ""),
        # Packed weights have several in a number.
        "num_parameters": 0 if method else counts.total(),
        "quantization": str(method).upper() if method else counts.most_common(1)[0][0] if counts else "",
        "trained_len": _number(keys, "max_position_embeddings"),
        "hidden_size": _number(keys, "hidden_size"),
        "num_layers": _number(keys, "num_hidden_layers"),
    }


def _parameters_by_type(file: Path) -> Counter[str]:
    """Returns the number of parameters by the name of their type. Raises ValueError or OSError."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length)) if length <= _MAX_HEADER_BYTES else None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: not a safetensors file")
    counts: Counter[str] = Counter()
    for name, entry in header.items():
        if name != "__metadata__" and isinstance(entry, dict):
            counts[str(entry.get("dtype"))] += math.prod(entry.get("shape", ()))
    return counts


def _number(values: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**31 else otherwise
