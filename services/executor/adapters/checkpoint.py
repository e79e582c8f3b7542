"""An adapter's files as they are read: PEFT's folder, or a GGUF file of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path

from pagewire.services.executor.adapters.low_rank import AdapterError as AdapterError
from pagewire.services.executor.adapters.low_rank import AdapterFiles as AdapterFiles
from pagewire.services.executor.adapters.low_rank import LowRank as LowRank
from pagewire.services.executor.adapters.peft import CONFIG, read_peft


def read_adapter(path: Path, heads: tuple[int, int] | None = None) -> AdapterFiles:
    """Reads a folder of PEFT's or a GGUF file. Raises AdapterError.

    heads: the model's query heads and KV heads, without which GGUF files of some architectures, Llama's among them,
    cannot be read.
    """
    if (path / CONFIG).is_file():
        return read_peft(path)
    if path.suffix == ".gguf" and path.is_file():
        # Imports `gguf`, which only these files need.
        from pagewire.services.executor.adapters.gguf import read_gguf

        return read_gguf(path, heads)
    raise AdapterError(
        f"{path}: neither a folder with {CONFIG} nor a .gguf file; name the folder that PEFT's save_pretrained wrote"
    )
