"""Writes a checkpoint's safetensors tensor by tensor, and the directory as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from pagewire.errors import StartupError

MAX_SHARD_BYTES = 5 * 10**9

# safetensors' names
_TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
}


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yields a directory next to `out` that takes its place if the block succeeds, and is removed if not.

    Raises StartupError if `out` exists and is not empty, or cannot be written.
    """
    out = out.absolute()
    check_free(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise StartupError(f"--out {out}: cannot be written ({error})") from error
    try:
        yield directory
        directory.chmod(0o755)
        directory.rename(out)  # also over an empty directory
    except OSError as error:
        raise StartupError(f"--out {out}: cannot be written ({error}); nothing was kept") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raises StartupError unless `out` is an empty directory or does not exist."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise StartupError(f"--out {out}: exists and is not an empty directory; name another, or remove it")


class CheckpointWriter:
    """`model.safetensors`, or shards and their index where that would be larger than `max_shard_bytes`.

    Format: https://huggingface.co/docs/safetensors: the header's length as uint64, the header as JSON, then the bytes.
    A shard's bytes go to a file at once, and after its header when it is full: memory holds one tensor.
    """

    def __init__(self, directory: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._directory, self._max_shard_bytes = directory, max_shard_bytes
        self._headers: list[dict[str, object]] = []
        self._data = (directory / "shard.data").open("w+b")
        self._header: dict[str, object] = {}
        self._size = 0
        self.total_bytes = 0

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._data.close()

    def write(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu().contiguous()
        if self._size and self._size + tensor.nbytes > self._max_shard_bytes:
            self._end_shard()
        self._header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._size, self._size + tensor.nbytes],
        }
        self._data.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._size += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def _end_shard(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # so that the tensors are aligned
        self._data.seek(0)
        with (self._directory / f"shard-{len(self._headers)}").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            shutil.copyfileobj(self._data, file, 1 << 24)
            file.flush()
            os.fsync(file.fileno())
        self._data.seek(0)
        self._data.truncate()
        self._headers.append(self._header)
        self._header, self._size = {}, 0

    def _finish(self) -> None:
        self._end_shard()
        (self._directory / "shard.data").unlink()
        count = len(self._headers)
        if count == 1:
            (self._directory / "shard-0").rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, header in enumerate(self._headers):
            name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            (self._directory / f"shard-{index}").rename(self._directory / name)
            weight_map |= dict.fromkeys(header, name)
        content = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
